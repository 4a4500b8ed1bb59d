#!/usr/bin/env bash
# Run the provisioning scripts from one number to another: run.sh 10 11. As root, with IMAGE and CLOUD set, and with
# SPOTRUN_COMMIT and SPOTRUN_BUILT for the manifest.
set -euo pipefail
first=${1:?first number} last=${2:?last number}
for script in "${IMAGE:?}"/provision/[0-9][0-9]-*.sh; do
    number=$(basename "$script")
    number=${number%%-*}
    if ((10#$number >= first && 10#$number <= last)); then
        echo "== $(basename "$script")"
        "$script"
    fi
done
