# shellcheck shell=bash
# shellcheck disable=SC2154 # variables that lib.sh sets
# Everything that a user sees: DriverBuilds, `farrier status`, Events and metrics.

definition "{strategy: image, namespace: $drivers, daemonSet: solo, container: driver, stableFor: 2s}"
add_node n1 "$kernel_a"
add_daemonset solo "$registry/$driver:vendor" RollingUpdate
start_farrier one
expect 30 "the image is rolled out" has_image solo "$image_a"
# DriverBuilds and `farrier status` must agree on image, kernel and phase.
same_story() {
    local told
    told="$(as_farrier status --cluster kube --registry "$registry" -o json |
        jq -r '.[] | "\(.image) \(.kernel | sub(" .*"; "")) \(.phase)"' | sort)"
    printf 'farrier status:\n%s\nkubectl get dbuild:\n%s\n' "$told" "$(dbuild_phases)"
    [ -n "$told" ] && [ "$told" = "$(dbuild_phases)" ]
}
expect 20 "kubectl get dbuild and farrier status agree" same_story
k get dbuild -n "$ns" > "$here/dbuild.txt"
grep -qF "$driver" "$here/dbuild.txt" || fail "kubectl get dbuild shows the matrix"
rewritten() { k get events.events.k8s.io -n "$drivers" -o json | jq -e '.items | any(.regarding.name == "solo" and .reportingController != null)'; }
expect 20 "an Event on the DaemonSet reports the rewrite" rewritten

get one healthz > /dev/null
get one metrics > "$here/metrics.txt"
# farrier must export every metric that the dashboard uses.
grep -o 'farrier_[a-z_]*' "$root/deploy/dashboard/farrier.json" | sort -u > "$here/shown.txt"
while read -r name; do
    # These metrics have no samples while nothing is unresolved, nothing is upgraded, and site.yaml names no certificate.
    case "$name" in farrier_*_unresolved_seconds | farrier_upgrade_nodes | farrier_certificate_expiry_timestamp_seconds) continue ;; esac
    family="${name%_bucket}"
    grep -qE "^# TYPE (${family}|${family%_total}) " "$here/metrics.txt" ||
        fail "/metrics has $name, which the dashboard shows"
done < "$here/shown.txt"

# An invalid file keeps the last valid configuration and is reported.
echo 'kind: Nonsense' > "$here/definitions/images/bad.yaml"
invalid() { get one metrics | grep -q '^farrier_configuration_valid 0'; }
expect 30 "a bad definition is reported" invalid
reboot n1 "$kernel_b"
expect 30 "the last valid configuration stays in effect" has_image solo "$image_b"
rm "$here/definitions/images/bad.yaml"
expect 30 "without the file the configuration is valid" not invalid
