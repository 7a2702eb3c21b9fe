//! The party to blame for a failure, beside the text of the failure.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The party that can remove the cause of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Blame {
    /// The daemon that answers, or the state that it is in: read its log.
    Node,
    /// Another node, or the path to it: read the log of the node that the text names.
    Peer,
    /// The server program or a client of it: change or restart the program, or try again.
    Program,
    /// The operator: change the request, the configuration, or the software and files of a host.
    Operator,
    /// The kernel refused a system call or lacks a feature: see the kernel's log and limits.
    Kernel,
}
