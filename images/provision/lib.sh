# shellcheck shell=bash
# What the provisioning scripts share. They run as root, in order, in the machine that becomes the image, with
# IMAGE, the folder that Packer has put images/ in, and CLOUD, gcp or aws.

: "${IMAGE:?is the folder that holds provision/, root/ and versions.env}" "${CLOUD:?is gcp or aws}"
set -o allexport
# shellcheck source=images/versions.env
source "$IMAGE/versions.env"
# shellcheck source=images/sources.env
source "$IMAGE/sources.env"
set +o allexport
export DEBIAN_FRONTEND=noninteractive

# Install packages: `name` or `name=version`. Nothing that they only recommend.
install_packages() {
    apt-get -q -y -o Dpkg::Options::=--force-confold --allow-change-held-packages --allow-downgrades \
        --no-install-recommends install "$@"
}

# Hold packages at what they are. Their names.
hold_packages() {
    apt-mark hold "$@" >/dev/null
}

# Download to a file and check it: URL, its SHA-256, file. What does not fit is removed, and ends the script.
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
