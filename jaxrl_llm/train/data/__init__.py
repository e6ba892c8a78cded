"""What a batch holds beside its tokens: rewards, fields of rows and episodes, stored responses."""
