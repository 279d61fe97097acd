"""What editors ask of a policy while it is written: `document` answers, `server` speaks the protocol (extra `lsp`)."""
