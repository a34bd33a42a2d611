# shellcheck shell=bash
# shellcheck disable=SC2154 # variables that lib.sh sets
# The page lets users do what the API server lets them do: farrier authenticates users with a TokenReview, and authorizes their
# actions with SubjectAccessReviews.

definition "{strategy: image, namespace: $drivers, daemonSet: solo, container: driver, stableFor: 2s}"
add_node n1 "$kernel_a"
add_daemonset solo "$registry/$driver:vendor" RollingUpdate
for person in operator viewer; do k create serviceaccount "$person" -n "$drivers" > /dev/null; done
k create role solo -n "$drivers" --verb patch --resource daemonsets.apps --resource-name solo > /dev/null
k create rolebinding solo -n "$drivers" --role solo --serviceaccount "$drivers:operator" > /dev/null
start_farrier one --page-actions
expect 30 "the image is rolled out" has_image solo "$image_a"

# ask PERSON ADDRESS [CURL-OPTION...]: sends a request like a proxy that adds the user's token.
ask() {
    local token
    token="$(k create token "$1" -n "$drivers" --duration 10m)"
    curl --silent --show-error --header "X-Forwarded-For: 203.0.113.7" --header "Authorization: Bearer $token" "${@:3}" \
        "http://127.0.0.1:$(cat "$here/farrier-one.port")/$2"
}
says() { ask "$1" "$2" | tee "$here/page.txt" | grep -qF -- "$3"; }
# act WHAT: previews an action and confirms it.
act() {
    local seen
    seen="$(ask operator "do?what=$1&of=$drivers/solo" | sed -n 's/.*name="seen" value="\([0-9a-f]*\)".*/\1/p')"
    [ "$(ask operator "do" --header 'Sec-Fetch-Site: same-origin' --data "what=$1&of=$drivers/solo&seen=$seen" \
        --output "$here/done.txt" --write-out '%{http_code}')" = 303 ]
}

pause="do?what=pause&of=$drivers/solo"
expect 10 "without the permission to review tokens, farrier refuses all actions" says operator "$pause" "may not create tokenreviews"
sed -e "s/farrier-page/$account-page/" -e "s/name: farrier, namespace: farrier}/name: $account, namespace: $ns}/" \
    "$root/deploy/kustomize/components/page-actions/rbac.yaml" > "$here/page-rbac.yaml"
k apply --server-side -f "$here/page-rbac.yaml" > /dev/null
k label -f "$here/page-rbac.yaml" "$run_label=$run" > /dev/null
expect 30 "a user who may patch the DaemonSet sees the preview" says operator "$pause" "farrier.dev/paused"
expect 0 "a user who may not patch the DaemonSet is refused" says viewer "$pause" "$drivers:viewer may not patch $drivers/solo"
expect 0 "the refused user sees no buttons" not says viewer rollouts.html 'do?what'

expect 0 "the rollout is paused" act pause
reboot n1 "$kernel_b"
expect 30 "the page shows the paused rollout" says viewer rollouts.html "it is paused"
steady 4 "the paused DaemonSet stays unchanged" ds_spec solo
expect 0 "the rollout resumes" act resume
expect 30 "kernel B's image is set" has_image solo "$image_b"
expect 0 "the rollout is reverted" act restore
expect 10 "the DaemonSet has the previous image" has_image solo "$image_a"
steady 4 "the running farrier keeps the previous image" has_image solo "$image_a"
