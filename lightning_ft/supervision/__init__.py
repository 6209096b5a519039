"""The process side: a supervisor that starts ranks, sees them die, decides who is a member and starts them again."""
