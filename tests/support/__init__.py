"""What several tests share: small federations, oracles, hostile servers, journals."""
