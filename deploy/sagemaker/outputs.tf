output "role" {
  description = "role: of the target in accel.yaml"
  value       = aws_iam_role.execution.arn
}

output "s3_output_path" {
  description = "s3_output_path: of the target in accel.yaml"
  value       = "s3://${aws_s3_bucket.jobs.bucket}"
}

output "launcher_policy" {
  description = "ARN of the policy to attach to the users and roles that submit jobs"
  value       = aws_iam_policy.launcher.arn
}
