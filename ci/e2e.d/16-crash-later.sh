# shellcheck shell=bash
# shellcheck disable=SC2154 # variables that lib.sh sets
# A new image's driver is ready in time but crashes after a minute, while farrier still watches the rollout: farrier restores
# the previous image.

start_crashing_driver "stableFor: 90s, deadline: 30s"
crash_after 60
expect 30 "the image that will crash is set" has_image solo "$bad"
expect 30 "its driver is ready" driver_runs "$bad"
steady 35 "the image stays after its deadline" ds_image solo
expect 0 "the image is not recorded as good" never_good
expect 60 "after the crash the previous image is restored" has_image solo "$good"
expect 10 "the record contains the pod's termination message" record_tells
expect 30 "the driver works again" driver_runs "$good"
