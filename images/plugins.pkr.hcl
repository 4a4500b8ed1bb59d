# Apart from the rest: Debian's own Packer, 1.6.6, has both builders built in and does not know this block.
packer {
  required_version = ">= 1.9.0"
  required_plugins {
    amazon = {
      source  = "github.com/hashicorp/amazon"
      version = "~> 1.3"
    }
    googlecompute = {
      source  = "github.com/hashicorp/googlecompute"
      version = "~> 1.2, >= 1.2.5" # oslogin_ssh_key_expire_after
    }
  }
}
