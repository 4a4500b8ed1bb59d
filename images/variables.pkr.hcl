# What `make image` passes (images/build.py), and what an operator may set in images/mine.auto.pkrvars.hcl. A check removes
# the allowed pattern from the value: a good value is then empty. Packer 1.6.6 has no other way to match.

variable "commit" {
  type        = string
  description = "The checkout's commit, from which the wheel is built."
  validation {
    condition     = var.commit != "" && regex_replace(var.commit, "^[0-9a-f]{40}(-dirty)?$", "") == ""
    error_message = "The commit must be 40 hexadecimal digits, with -dirty behind them if the checkout has changes."
  }
}

variable "built" {
  type        = string
  description = "The time of the build in UTC, as 20261121-093000."
  validation {
    condition     = var.built != "" && regex_replace(var.built, "^[0-9]{8}-[0-9]{6}$", "") == ""
    error_message = "The time must be written as 20261121-093000."
  }
}

variable "wheel" {
  type        = string
  description = "Folder with the one wheel of spotrun to install."
  default     = "build/image/wheel"
}

variable "disk_gb" {
  type        = number
  description = "Size in GB of the image's disk and of the head's, and the least size of a pool's disk. torch with CUDA takes 8."
  default     = 30
  validation {
    condition     = var.disk_gb >= 20
    error_message = "The disk must have 20 GB or more."
  }
}

variable "gcp_project" {
  type        = string
  description = "Google Cloud project to build in and to keep the image in."
  default     = ""
  validation {
    condition     = regex_replace(var.gcp_project, "^([a-z][a-z0-9.:-]*[a-z0-9])?$", "") == ""
    error_message = "The project must be its id, not its name or number."
  }
}

variable "gcp_zone" {
  type        = string
  description = "Zone to build in."
  default     = "us-central1-a"
  validation {
    condition     = var.gcp_zone != "" && regex_replace(var.gcp_zone, "^[a-z]+-[a-z]+[0-9]+-[a-z]$", "") == ""
    error_message = "The zone must be written as us-central1-a."
  }
}

variable "gcp_machine" {
  type        = string
  description = "Machine type to build on; it needs no GPU."
  default     = "e2-standard-4"
}

variable "gcp_subnetwork" {
  type        = string
  description = "Subnetwork to build in: IAP may reach port 22 in it, and it has a way out (Cloud NAT)."
  default     = "default"
}

variable "aws_region" {
  type        = string
  description = "Region to build in, and to keep the image in."
  default     = "us-east-1"
  validation {
    condition     = var.aws_region != "" && regex_replace(var.aws_region, "^[a-z]{2}(-[a-z]+)+-[0-9]$", "") == ""
    error_message = "The region must be written as us-east-1."
  }
}

variable "aws_machine" {
  type        = string
  description = "Machine type to build on, x86-64; it needs no GPU and no EFA."
  default     = "m6i.xlarge"
}

variable "aws_subnet" {
  type        = string
  description = "Subnet to build in on AWS, with a way out (NAT); images/build.py needs this or aws_public."
  default     = ""
  validation {
    condition     = regex_replace(var.aws_subnet, "^(subnet-[0-9a-f]+)?$", "") == ""
    error_message = "The subnet must be written as subnet-0123456789abcdef0."
  }
}

variable "aws_public" {
  type        = bool
  description = "Build on AWS with a public address, in the default VPC unless aws_subnet is named. No port is opened."
  default     = false
}
