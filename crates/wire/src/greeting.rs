//! What two nodes tell each other when they connect, so that disagreement between them is noticed at once.

use crate::NodeId;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

/// Maximum length of a text in a greeting, in bytes: such texts are logged before the nodes know each other.
pub const GREETING_TEXT_BYTES_MAX: usize = 64;

/// Facts about a node that its peers compare with their own.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeFacts {
    /// Release of the node's daemon.
    #[serde(deserialize_with = "greeting_text")]
    pub release: String,
    /// The node's clock, in milliseconds since 1970; 0 if unknown.
    pub clock_ms: u64,
    /// How the node's group is run; none if unknown.
    pub mode: Option<GroupMode>,
}

/// How a group is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum GroupMode {
    /// Files name the contact node, the nodes and the services.
    Configured(ConfiguredSettings),
    /// The group elects its contact node.
    SelfRunning,
}

/// Settings that the files of all nodes must agree on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfiguredSettings {
    /// Number of the contact node.
    pub contact: NodeId,
    /// Digest of the reach and its parameters.
    pub reach: u64,
    /// Digest of the services with their weights.
    pub services: u64,
}

/// Reason for which nodes do not talk to each other. The words hold at both ends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum GreetingRefusal {
    /// The nodes belong to different groups.
    #[error(
        "the nodes belong to groups `{listener}` and `{dialler}`; correct [group] name or the address"
    )]
    Group {
        /// Group of the node that was dialled.
        #[serde(deserialize_with = "greeting_text")]
        listener: String,
        /// Group of the node that dialled.
        #[serde(deserialize_with = "greeting_text")]
        dialler: String,
    },
    /// The certificate belongs to another node than the greeting claims, or to no node of the group.
    #[error(
        "node {claimed} has the certificate of {certificate}; use the same [[peer]] on all nodes"
    )]
    Number {
        /// Number in the greeting.
        claimed: NodeId,
        /// Owner of the certificate, in words.
        #[serde(deserialize_with = "greeting_text")]
        certificate: String,
    },
    /// Two hosts have the certificate of one node.
    #[error(
        "two hosts have the certificate of node `{name}`; stop one of them, and let it join under a name of its own"
    )]
    SameCertificate {
        /// Name of the node.
        #[serde(deserialize_with = "greeting_text")]
        name: String,
    },
    /// The files name different contact nodes.
    #[error(
        "the files of the two nodes name different contact nodes, {listener} and {dialler}; set the same group.contact on all nodes"
    )]
    Contact {
        /// Contact node of the node that was dialled.
        listener: NodeId,
        /// Contact node of the node that dialled.
        dialler: NodeId,
    },
    /// The files give different reaches.
    #[error(
        "the files of the two nodes differ in group.reach or group.shared_mac; make them equal on all nodes"
    )]
    Reach,
    /// One node belongs to a group that files configure, the other to one that runs itself.
    #[error(
        "the file of one node has group.contact and that of the other has none; make both files alike"
    )]
    ConfiguredAndSelfRun,
}

/// Reads a text of at most [`GREETING_TEXT_BYTES_MAX`] bytes.
pub(crate) fn greeting_text<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<String, D::Error> {
    let text = String::deserialize(deserializer)?;
    match text.len() <= GREETING_TEXT_BYTES_MAX {
        true => Ok(text),
        false => Err(D::Error::invalid_length(text.len(), &"a short text")),
    }
}
