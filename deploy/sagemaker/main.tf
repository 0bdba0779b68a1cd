# The bucket, the execution role and the launcher's policy of accel's jobs on SageMaker.

terraform {
  required_version = ">= 1.5"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.0"
    }
  }
}

data "aws_caller_identity" "current" {}

data "aws_partition" "current" {}

locals {
  # What stands in braces in the policies.
  names = {
    account   = data.aws_caller_identity.current.account_id
    bucket    = aws_s3_bucket.jobs.bucket
    partition = data.aws_partition.current.partition
    region    = var.region
    role      = var.role
    secrets   = var.secrets
  }
}

resource "aws_s3_bucket" "jobs" {
  bucket = var.bucket
  tags   = var.tags
}

resource "aws_s3_bucket_public_access_block" "jobs" {
  bucket                  = aws_s3_bucket.jobs.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

# Uploads that were cut off are resumed for a week.
resource "aws_s3_bucket_lifecycle_configuration" "jobs" {
  bucket = aws_s3_bucket.jobs.id

  rule {
    id     = "uploads"
    status = "Enabled"

    filter {
      prefix = ""
    }

    abort_incomplete_multipart_upload {
      days_after_initiation = 7
    }
  }
}

resource "aws_iam_role" "execution" {
  name               = var.role
  assume_role_policy = file("${path.module}/trust.json")
  tags               = var.tags
}

resource "aws_iam_role_policy" "execution" {
  name   = "execution"
  role   = aws_iam_role.execution.id
  policy = templatefile("${path.module}/execution.json", local.names)
}

resource "aws_iam_policy" "launcher" {
  name   = "${var.role}-launcher"
  policy = templatefile("${path.module}/launcher.json", local.names)
  tags   = var.tags
}
