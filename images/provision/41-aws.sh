#!/usr/bin/env bash
# For logins on AWS: Amazon's SSM agent and the scripts of EC2 Instance Connect, which Debian does not have.
set -euo pipefail
source "${IMAGE:?}/provision/lib.sh"
[[ $CLOUD == aws ]] || exit 0

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
download "$SSM_AGENT_URL" "$SSM_AGENT_SHA256" "$work/amazon-ssm-agent.deb"
install_packages "$work/amazon-ssm-agent.deb"
put 0755 /usr/lib/spotrun/role
put 0644 /etc/systemd/system/amazon-ssm-agent.service.d/spotrun.conf
systemctl enable amazon-ssm-agent.service

folder=/usr/share/ec2-instance-connect
for each in "run $EIC_RUN_SHA256" "curl $EIC_CURL_SHA256" "parse $EIC_PARSE_SHA256"; do
    read -r name sha256 <<<"$each"
    download "$EC2_INSTANCE_CONNECT_URL/eic_${name}_authorized_keys" "$sha256" "$work/$name"
    install -D --owner=root --group=root --mode=0755 "$work/$name" "$folder/eic_${name}_authorized_keys"
done
getent passwd ec2-instance-connect >/dev/null ||
    useradd --system --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin ec2-instance-connect
put 0644 /etc/ssh/sshd_config.d/20-ec2-instance-connect.conf

# The machine makes its own host key and publishes it in the bucket. A key made after that would be refused.
put 0644 /etc/cloud/cloud.cfg.d/99-spotrun.cfg
