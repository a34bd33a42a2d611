# shellcheck shell=bash
# shellcheck disable=SC2154 # variables of ci/e2e.d/lib.sh
# The driver of a new image crashes at each start. Without a readiness probe its container is ready for a moment each time:
# that is no success. The image before it comes back, with the pod's last words.

start_crashing_driver "stableFor: 10s, deadline: 20s"
crash_after 0
expect 30 "the image that crashes is set" has_image solo "$bad"
expect 20 "its container has been started again" restarted
expect 5 "which is not taken for good" never_good
expect 60 "after its deadline the image before it is back" has_image solo "$good"
expect 10 "the record has the pod's last words" record_tells
expect 20 "the plan has them" plan_tells
expect 20 "and an event" event_tells
expect 30 "the driver works again" driver_runs "$good"
steady 6 "and the other image is not tried again" ds_spec solo
