"""The T5X dialect: parses gin files and --gin.MACRO=VALUE overrides into typed records."""
