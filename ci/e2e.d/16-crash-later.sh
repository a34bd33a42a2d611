# shellcheck shell=bash
# shellcheck disable=SC2154 # variables of ci/e2e.d/lib.sh
# The driver of a new image is ready in time and crashes after a minute, while it is still watched: the image before it
# comes back.

start_crashing_driver "stableFor: 90s, deadline: 30s"
crash_after 60
expect 30 "the image that will crash is set" has_image solo "$bad"
expect 30 "its driver is ready" driver_runs "$bad"
steady 35 "past its deadline it stays" ds_image solo
expect 0 "and is not taken for good" never_good
expect 60 "it crashes: the image before it is back" has_image solo "$good"
expect 10 "the record has the pod's last words" record_tells
expect 30 "the driver works again" driver_runs "$good"
