# One build, two images: the same scripts on Google's and on Amazon's Debian 12. `make image CLUSTER=…` runs the one that
# the cluster's cloud needs. docs/images.md says what is in it, and why Debian.

locals {
  versions = { for line in split("\n", file("versions.env")) :
    split("=", line)[0] => split("=", line)[1] if length(split("=", regex_replace(line, "^#.*", ""))) == 2
  }
  name = "spotrun-${var.built}"
  # Google's labels take lower-case letters, digits, - and _.
  labels = {
    spotrun-commit = substr(var.commit, 0, 12)
    spotrun-driver = replace(local.versions.NVIDIA_DRIVER, ".", "-")
    spotrun-torch  = replace(local.versions.TORCH, ".", "-")
    spotrun-kernel = replace(local.versions.KERNEL_ABI, ".", "-")
  }
  # Packer's session needs Amazon's SSM agent, which Debian's image lacks. This runs only at the builder's first boot.
  first_boot = <<-EOT
    #!/bin/bash
    set -euo pipefail
    cd "$(mktemp -d)"
    curl --fail --silent --show-error --location --retry 10 --output agent.deb \
      "https://s3.amazonaws.com/ec2-downloads-windows/SSMAgent/${local.versions.SSM_AGENT}/debian_amd64/amazon-ssm-agent.deb"
    echo "${local.versions.SSM_AGENT_SHA256}  agent.deb" | sha256sum --check
    dpkg -i agent.deb
  EOT
}

source "googlecompute" "gcp" {
  project_id              = var.gcp_project
  zone                    = var.gcp_zone
  machine_type            = var.gcp_machine
  subnetwork              = var.gcp_subnetwork
  source_image_family     = "debian-12"
  source_image_project_id = ["debian-cloud"]
  disk_size               = var.disk_gb
  disk_type               = "pd-ssd"

  image_name        = local.name
  image_family      = "spotrun"
  image_description = "spotrun, commit ${var.commit}"
  image_labels      = local.labels
  labels            = local.labels

  # No public address; Packer's key reaches the builder through OS Login. Packer takes it out of the operator's profile
  # at the end, and should that fail, it expires.
  omit_external_ip = true
  use_internal_ip  = true
  use_iap          = true
  use_os_login     = true
  metadata         = { enable-oslogin = "TRUE", block-project-ssh-keys = "TRUE" }
  ssh_username     = "packer"
  # { Packer 1.6.6 does not know the next line, so images/lint.py removes it for that version.
  oslogin_ssh_key_expire_after = "2h"
  # }
  # The builder itself calls no API of Google.
  disable_default_service_account = true
}

source "amazon-ebs" "aws" {
  region        = var.aws_region
  instance_type = var.aws_machine
  subnet_id     = var.aws_subnet
  source_ami_filter {
    filters = {
      name                = "debian-12-amd64-*"
      architecture        = "x86_64"
      root-device-type    = "ebs"
      virtualization-type = "hvm"
    }
    owners      = ["136693071363"] # https://wiki.debian.org/Cloud/AmazonEC2Image
    most_recent = true
  }
  launch_block_device_mappings {
    device_name           = "/dev/xvda"
    volume_size           = var.disk_gb
    volume_type           = "gp2"
    delete_on_termination = true
  }

  ami_name        = local.name
  ami_description = "spotrun, commit ${var.commit}"
  tags            = merge(local.labels, { Name = local.name })
  snapshot_tags   = merge(local.labels, { Name = local.name })
  run_tags        = merge(local.labels, { Name = "${local.name}-builder" })
  run_volume_tags = merge(local.labels, { Name = "${local.name}-builder" })
  ena_support     = true

  # The session is SSM's, whose agent calls out: Packer's security group lets nothing in, with a public address or
  # without. The key is a temporary one that is removed with everything else. A build with a public address needs no
  # subnet's name: Packer takes one of the default VPC, in a zone that has the machine type.
  ssh_username                = "admin"
  ssh_interface               = "session_manager"
  associate_public_ip_address = var.aws_public
  user_data                   = local.first_boot
  # The first boot installs the agent. A session does not outlive a reboot, and its plugin may keep Packer's connection
  # open without an answer: a server that is there answers Packer's sign of life, each 5 s.
  # https://github.com/hashicorp/packer-plugin-amazon/pull/311
  ssh_timeout            = "15m"
  ssh_read_write_timeout = "3m"
  # { Packer 1.6.6 does not know the next block, so images/lint.py removes it for that version.
  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }
  # }
  # What the SSM agent needs to open a session, while the build runs.
  temporary_iam_instance_profile_policy_document {
    Version = "2012-10-17"
    Statement {
      Effect = "Allow"
      Action = [
        "ssm:UpdateInstanceInformation",
        "ssmmessages:CreateControlChannel",
        "ssmmessages:CreateDataChannel",
        "ssmmessages:OpenControlChannel",
        "ssmmessages:OpenDataChannel",
      ]
      Resource = ["*"]
    }
  }
}

build {
  sources = ["source.googlecompute.gcp", "source.amazon-ebs.aws"]

  provisioner "shell" {
    inline = ["while [ -d /run/cloud-init ] && [ ! -e /run/cloud-init/result.json ]; do sleep 1; done", "mkdir -p /tmp/image/wheel"]
  }
  provisioner "file" {
    sources     = ["${path.root}/provision", "${path.root}/root", "${path.root}/versions.env", "${path.root}/sources.env"]
    destination = "/tmp/image/"
  }
  provisioner "file" {
    sources     = ["${path.root}/../constraints.txt", "${path.root}/requirements.txt"]
    destination = "/tmp/image/"
  }
  provisioner "file" {
    source      = "${var.wheel}/"
    destination = "/tmp/image/wheel/"
  }

  # Up to the kernel that everything else is built for. Then the builder boots that kernel.
  provisioner "shell" {
    inline = ["sudo env IMAGE=/tmp/image CLOUD=${source.name} bash /tmp/image/provision/run.sh 10 11"]
  }
  provisioner "shell" {
    inline            = ["sudo mv /tmp/image /var/lib/spotrun-image", "sudo systemctl reboot"] # /tmp is emptied at a boot
    expect_disconnect = true
    skip_clean        = true
  }
  # The old session's plugin gives up after a minute and a half. Then Packer starts another session.
  provisioner "shell" {
    pause_before        = "2m"
    start_retry_timeout = "15m"
    inline = [
      "test \"$(uname -r)\" = '${local.versions.KERNEL_ABI}' || { echo \"booted $(uname -r), not the pinned kernel\" >&2; exit 1; }",
      "sudo mv /var/lib/spotrun-image /tmp/image",
      "sudo env IMAGE=/tmp/image CLOUD=${source.name} SPOTRUN_COMMIT=${var.commit} SPOTRUN_BUILT=${var.built} bash /tmp/image/provision/run.sh 20 90",
    ]
  }
  provisioner "file" {
    direction   = "download"
    source      = "/etc/spotrun/image.json"
    destination = "build/image/image-${source.name}.json"
  }
  # The last: after it no key fits any more, and nobody may use sudo. So one command cleans, and removes what was
  # uploaded.
  provisioner "shell" {
    inline     = ["sudo env IMAGE=/tmp/image CLOUD=${source.name} sh -c 'bash /tmp/image/provision/run.sh 99 99 && rm -rf /tmp/image /tmp/script_*.sh'"]
    skip_clean = true
  }

  post-processor "manifest" {
    output     = "build/image/packer.json"
    strip_path = true
  }
}
