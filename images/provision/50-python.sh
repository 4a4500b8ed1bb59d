#!/usr/bin/env bash
# Python, and an environment with torch, this checkout's spotrun, and other packages for jobs. pip compiles everything, so
# that no start has to.
set -euo pipefail
source "${IMAGE:?}/provision/lib.sh"

install_packages "python$PYTHON" "python$PYTHON-venv" "python$PYTHON-dev"
venv=/opt/spotrun/venv
wheels=("$IMAGE"/wheel/spotrun-*.whl)
if ((${#wheels[@]} != 1)) || [[ ! -e ${wheels[0]} ]]; then
    echo "$IMAGE/wheel must hold one wheel of spotrun, not ${#wheels[@]}: ${wheels[*]}" >&2
    exit 1
fi
mkdir -p /opt/spotrun
[[ -x $venv/bin/python ]] || "python$PYTHON" -m venv "$venv"
options=(--no-input --disable-pip-version-check --no-cache-dir --quiet --constraint "$IMAGE/constraints.txt")
"$venv/bin/python" -m pip install "${options[@]}" "spotrun[train,$CLOUD] @ file://${wheels[0]}" \
    --requirement "$IMAGE/requirements.txt"
# The same version may have been built from another commit.
"$venv/bin/python" -m pip install "${options[@]}" --no-deps --force-reinstall "${wheels[0]}"
"$venv/bin/python" -I - "$TORCH" "$TORCH_CUDA" <<'PY'
import sys, torch, spotrun.cli
found = [torch.__version__.partition("+")[0], torch.version.cuda or ""]
sys.exit(0 if found == sys.argv[1:] else f"torch and its CUDA are {found}, but versions.env has {sys.argv[1:]}")
PY
chown -R root:root /opt/spotrun
chmod -R go-w /opt/spotrun
