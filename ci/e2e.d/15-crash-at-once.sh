# shellcheck shell=bash
# shellcheck disable=SC2154 # variables that lib.sh sets
# A new image's driver crashes at each start. Without a readiness probe its container is ready for a moment each time, which
# does not count as success. farrier restores the previous image and reports the pod's termination message.

start_crashing_driver "stableFor: 10s, deadline: 20s"
crash_after 0
expect 30 "the crashing image is set" has_image solo "$bad"
expect 20 "its container has restarted" restarted
expect 5 "the image is not recorded as good" never_good
expect 60 "after the deadline the previous image is restored" has_image solo "$good"
expect 10 "the record contains the pod's termination message" record_tells
expect 20 "the plan contains the message" plan_tells
expect 20 "an Event contains the message" event_tells
expect 30 "the driver works again" driver_runs "$good"
steady 6 "the crashing image is not retried" ds_spec solo
