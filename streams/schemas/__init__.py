"""Python types as JSON Schema: arguments and answers come in, results and content go out."""
