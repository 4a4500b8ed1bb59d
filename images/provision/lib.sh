# shellcheck shell=bash
# Functions for the provisioning scripts. These run as root, in order, in the machine that becomes the image. IMAGE is the
# folder where Packer put images/. CLOUD is gcp or aws.

: "${IMAGE:?is the folder that holds provision/, root/ and versions.env}" "${CLOUD:?is gcp or aws}"
set -o allexport
# shellcheck source=images/versions.env
source "$IMAGE/versions.env"
# shellcheck source=images/sources.env
source "$IMAGE/sources.env"
set +o allexport
export DEBIAN_FRONTEND=noninteractive

# Install packages, `name` or `name=version`, without recommended packages.
install_packages() {
    apt-get -q -y -o Dpkg::Options::=--force-confold --allow-change-held-packages --allow-downgrades \
        --no-install-recommends install "$@"
}

# Keep packages at their versions. Arguments: names.
hold_packages() {
    apt-mark hold "$@" >/dev/null
}

# Download a file and check it. Arguments: URL, SHA-256, file. A wrong file is removed, and the script ends.
download() {
    local url=$1 sha256=$2 file=$3
    if [[ ! $sha256 =~ ^[0-9a-f]{64}$ ]]; then
        echo "$url: no checksum is pinned for it in versions.env" >&2
        return 1
    fi
    curl --fail --silent --show-error --location --retry 5 --retry-connrefused --output "$file" "$url"
    if ! echo "$sha256  $file" | sha256sum --check --status; then
        echo "$url: its SHA-256 is $(sha256sum "$file" | cut -d' ' -f1), but versions.env has $sha256" >&2
        rm -f "$file"
        return 1
    fi
}

# Put a file of images/root where it belongs, owned by root: mode, absolute path.
put() {
    install -D --owner=root --group=root --mode="$1" "$IMAGE/root$2" "$2"
}
