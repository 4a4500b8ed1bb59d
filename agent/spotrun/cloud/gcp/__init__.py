"""Google Cloud: a pool is a zonal managed instance group (MIG) that Terraform made at size 0."""

from spotrun.cloud.gcp.cloud import GcpCloud as GcpCloud
