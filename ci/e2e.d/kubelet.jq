# Prints what the script's kubelet does next with each pod of its nodes: lines of action, pod and value, separated by tabs.
# $prefix is the prefix of the nodes' names. $fates describes images that do not simply work:
# {"sha256:...": {"never": WORDS}} never becomes ready;
# {"sha256:...": {"after": SECONDS, "words": WORDS}} crashes SECONDS after each start.
# A container without a readiness probe is ready from each start to its end. Its first restart is immediate, and further ones
# follow after 10 s, 20 s, 40 s. States and their order match a real kubelet (1.36).

def text: now | floor | todate;
def age: now - fromdateiso8601;

# Returns the complete status of a pod with one container in this state.
def status($ready; $restarts; $state; $last):
    .spec.containers[0] as $container
    | (if $ready then "True" else "False" end) as $held
    | (.status.conditions // []) as $old
    | ([$old[] | select(.type == "Ready" and .status == $held) | .lastTransitionTime][0] // text) as $since
    | {status: {
        phase: "Running", startTime: (.status.startTime // text),
        conditions: ([$old[] | select(.type != "Ready")]
            + [{type: "Ready", status: $held, lastTransitionTime: $since}
                + if $ready then {}
                  else {reason: "ContainersNotReady", message: "containers with unready status: [\($container.name)]"} end]),
        containerStatuses: [{name: $container.name, image: $container.image, imageID: $container.image, ready: $ready,
            started: $ready, restartCount: $restarts, state: $state, lastState: $last}]}};

def runs($restarts; $last): status(true; $restarts; {running: {startedAt: text}}; $last);

def next($fate):
    .status.containerStatuses[0] as $now
    | (if $now then $now.restartCount else 0 end) as $restarts
    | any(.status.conditions[]?; .type == "Ready" and .status == "True") as $ready
    | if $fate == null then
        if $ready then empty else runs(0; {}) end
      elif $fate.never then
        if $now.state.waiting then empty
        else status(false; 3; {waiting: {reason: "CrashLoopBackOff", message: $fate.never}}; {}) end
      elif $now == null then
        runs(0; {})
      elif $now.state.running then
        if ($now.state.running.startedAt | age) < $fate.after then empty
        else status(false; $restarts; {terminated: {exitCode: 3, reason: "Error", message: $fate.words,
            startedAt: $now.state.running.startedAt, finishedAt: text}}; $now.lastState // {}) end
      elif $now.state.terminated then
        if $restarts == 0 then runs(1; $now.state)
        else status(false; $restarts; {waiting: {reason: "CrashLoopBackOff",
            message: "back-off \(10 * pow(2; $restarts - 1))s restarting failed container=\($now.name) pod=\(.metadata.name)"}};
            $now.state) end
      elif ($now.lastState.terminated.finishedAt | age) < 10 * pow(2; $restarts - 1) then
        empty
      else
        runs($restarts + 1; $now.lastState)
      end;

.items[]
| .spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchFields as $fields
| ([$fields[]? | select(.key == "metadata.name") | .values[0]][0] // "") as $wanted
| (.spec.nodeName // $wanted) as $node
| select($node | startswith($prefix))
| $fates[.spec.containers[0].image | split("@")[-1]] as $fate
| if .metadata.deletionTimestamp then ["delete", .metadata.name, ""]
  elif (.spec.nodeName // "") == "" then ["bind", .metadata.name, $node]
  else ["status", .metadata.name, (next($fate) | tojson)] end
| join("\t")
