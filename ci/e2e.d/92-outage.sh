# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # variables that lib.sh sets or reads
# The API server becomes unreachable during a build. The build does not need the API server, so it continues. After the outage
# farrier rolls out the image without another build. farrier reaches the API server through a proxy, which the scenario stops.

proxy_port="$(free_port)"
server="$(k config view --raw --minify -o jsonpath='{.clusters[0].cluster.server}')"
address="${server#*://}" address="${address%%/*}"
[[ "$address" == *:* ]] || address="$address:443"
start_proxy() {
    python3 "$root/ci/e2e.d/proxy.py" "$proxy_port" "$address" "$here" > "$here/proxy.log" 2>&1 &
    echo $! > "$here/farrier-proxy.pid"
    expect 10 "the proxy to the API server is up" listens
}
listens() { (: < "/dev/tcp/127.0.0.1/$proxy_port") 2> /dev/null; }
start_proxy
cluster="$(KUBECONFIG="$here/kubeconfig" kubectl config view -o jsonpath='{.clusters[0].name}')"
KUBECONFIG="$here/kubeconfig" kubectl config set-cluster "$cluster" --server "https://127.0.0.1:$proxy_port" \
    --tls-server-name "${address%:*}" > /dev/null

# A separate tag pattern, so that there is something to build, and a step that takes a while.
tagged="{{version}}-outage-{{kernel_label}}"
definition "{strategy: image, namespace: $drivers, daemonSet: solo, container: driver, stableFor: 2s}"
mkdir -p "$here/definitions/templates"
sed "s|^FROM {{toolchain}} AS modules|&\nRUN sleep 25|" "$root/templates/kbuild.Dockerfile.hbs" \
    > "$here/definitions/templates/slow.Dockerfile.hbs"
sed -i 's/^  template: kbuild/  template: slow/' "$here/definitions/images/$driver.yaml"
add_node n1 "$kernel_a"
add_daemonset solo "$registry/$driver:vendor" RollingUpdate
start_farrier one
building() { dbuild_phases | grep -q building; }
expect 60 "the image is being built" building
stop "$here/farrier-proxy.pid"
builds() { grep -c 'build starts' "$here/farrier-one.log" || true; }
first="$(builds)"
expect 10 "the proxy to the API server is down" not listens
# Longer than the duration of the lease, and longer than the build.
sleep 35
expect 0 "farrier keeps running" alive "$here/farrier-one.pid"
start_proxy
expect 90 "after the outage the image is set" has_our_image solo
[ "$(builds)" = "$first" ] || fail "the image is built once: $first builds before the outage, $(builds) after it"
