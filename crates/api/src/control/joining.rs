//! `/v1/tokens`: join tokens; `/v1/revocations`: revocation lists.

use crate::ca::NodeRole;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Default life of a join token, in seconds.
pub const TOKEN_LIFETIME_S: u64 = 3_600;

/// Body of `POST /v1/tokens`: make a join token.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TokenRequest {
    /// Seconds for which the token can be used: 3600 unless given, at most 86400.
    pub lifetime_s: Option<u64>,
    /// The role that the certificate admits the host to: `backup` unless given.
    #[serde(default)]
    pub role: Option<NodeRole>,
}

/// Answer of `POST /v1/tokens`. The daemon keeps no copy of the token.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NewToken {
    /// The token, for one host. Whoever has it can join the group.
    pub token: String,
    /// Number of the token, which is not secret.
    pub id: String,
    /// Unix time at which the token ends, in seconds.
    pub expires_at_s: u64,
    /// Address at which the host asks for its certificate: ADDRESS:PORT.
    pub address: String,
}

/// The number alone: the token must not appear in logs.
impl fmt::Debug for NewToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NewToken({})", self.id)
    }
}

/// Answer of `GET /v1/tokens`: the join tokens of this node, in the order in which they were made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TokenList {
    /// The tokens, ended ones of the last day included.
    pub tokens: Vec<TokenEntry>,
}

/// A join token, without the secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TokenEntry {
    /// Number of the token.
    pub id: String,
    /// Unix time at which the token ends, in seconds.
    pub expires_at_s: u64,
    /// State of the token.
    pub state: TokenState,
    /// Name of the node that has used the token.
    pub node: Option<String>,
    /// The role that the certificate admits the host to.
    pub role: NodeRole,
}

/// State of a join token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TokenState {
    /// One host can use the token.
    Fresh,
    /// A node has used the token.
    Used,
    /// The time of the token is over.
    Expired,
    /// The operator has revoked the token.
    Revoked,
}

/// Body of `POST /v1/revocations`: put a revocation list in force at this node, which passes it on to the others.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RevocationRequest {
    /// The list in PEM, as `holdfast ca revoke` writes it.
    pub list: String,
}

/// Answer of `GET` and `POST /v1/revocations`: the lists in force at this node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RevocationStatus {
    /// One list for each authority of the group that has one.
    pub lists: Vec<RevocationEntry>,
}

/// A revocation list in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RevocationEntry {
    /// Number of the authority: the beginning of the digest of its public key.
    pub authority: String,
    /// Number of the list, which grows with each list of the authority.
    pub number: u64,
    /// Number of revoked certificates in the list.
    pub revoked: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_does_not_show_in_logs() {
        let token = NewToken {
            token: "secret".to_owned(),
            id: "4711".to_owned(),
            expires_at_s: 1,
            address: "10.0.0.1:7401".to_owned(),
        };
        assert_eq!(format!("{token:?}"), "NewToken(4711)");
    }
}
