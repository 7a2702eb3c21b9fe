//! `GET /v1/units/{unit}`, `GET /v1/processes/{pid}/check`, `POST /v1/migrations`, `GET /v1/migrations`, `GET
//! /v1/migrations/{id}` and `POST /v1/migrations/{id}/cancel`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Blame;

/// Answer of `GET /v1/processes/{pid}/check`: whether a process can move with all its children, and the size of its
/// state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ProcessCheck {
    /// PID of the process on this node.
    pub pid: i32,
    /// The process's name (`comm`).
    pub name: String,
    /// True if neither this node nor the node `to`, if asked, has an objection.
    pub movable: bool,
    /// Objections of this node.
    pub blockers: Vec<BlockerEntry>,
    /// Name of the node that was asked to take the process; none if the query named none, or there are blockers.
    #[serde(default)]
    pub to: Option<String>,
    /// Reasons for which that node would refuse the process, worded as in a migration.
    #[serde(default)]
    pub refusals: Vec<String>,
    /// PIDs of the process tree, the root first.
    pub processes: Vec<i32>,
    /// Number of threads in the tree.
    pub threads: u64,
    /// Number of memory mappings in the tree.
    pub mappings: u64,
    /// Number of open descriptors in the tree.
    pub descriptors: u64,
    /// Number of TCP and UDP sockets among the descriptors.
    pub sockets: u64,
    /// Memory in use, shared memory and files included, in bytes.
    pub memory_bytes: u64,
    /// Connections from a node's own address that would be forwarded by that node only, because their other ends run no
    /// daemon; written `tcp:LOCAL:PORT-REMOTE:PORT`.
    #[serde(default)]
    pub forwarded: Vec<String>,
    /// Shortest freeze to expect, in microseconds: copying memory that the process writes meanwhile adds to it.
    pub predicted_freeze_us: f64,
}

/// The query of `GET /v1/processes/{pid}/check`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProcessCheckQuery {
    /// Name of a node that is also asked to take the process.
    pub to: Option<String>,
}

/// A part of a process that cannot move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct BlockerEntry {
    /// The process of the tree.
    pub pid: i32,
    /// The descriptor, if the part is one.
    pub fd: Option<u32>,
    /// The file or object that the descriptor refers to.
    pub path: Option<String>,
    /// The reason that the part cannot move, and the remedy.
    pub reason: String,
}

/// Answer of `GET /v1/units/{unit}`: the process of a systemd unit, with all its children.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct UnitEntry {
    /// The unit, such as `game.service`.
    pub unit: String,
    /// The unit's control group, relative to the root group.
    pub group: String,
    /// PID on this node of the process with a parent outside the unit.
    pub pid: i32,
}

/// Strategy for moving the sockets of a process: the three of paper 002.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SocketStrategy {
    /// One socket at a time.
    Iterative,
    /// All sockets in one message.
    Collective,
    /// Sockets are created before the freeze; one message during the freeze carries the changes.
    #[default]
    Incremental,
}

impl SocketStrategy {
    /// Names, as in JSON and on command lines.
    pub const NAMES: [&str; 3] = ["iterative", "collective", "incremental"];

    /// Returns the strategy's name, as in JSON and on command lines.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }
}

impl std::str::FromStr for SocketStrategy {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        [Self::Iterative, Self::Collective, Self::Incremental]
            .into_iter()
            .find(|strategy| strategy.name() == name)
            .ok_or_else(|| format!("a strategy is one of {}", Self::NAMES.join(", ")))
    }
}

/// Body of `POST /v1/migrations`: `{"pid": 4242, "to": "n2"}`. Sent to the node where the process runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MigrationRequest {
    /// The process, which moves with all its children.
    pub pid: i32,
    /// Name of the node that takes the process.
    pub to: String,
    /// Strategy for moving the sockets.
    #[serde(default)]
    pub sockets: SocketStrategy,
    /// Clone: make a copy, and keep the original running here with its connections. The copy's connections are reset.
    #[serde(default)]
    pub clone: bool,
    /// Maximum predicted freeze, in microseconds. If no shorter freeze can be reached, the process stays, or its memory
    /// is sent by post-copy.
    #[serde(default)]
    pub max_freeze_us: Option<u64>,
    /// Allow post-copy: if the freeze would exceed `max_freeze_us` (or, without that limit, if further rounds of
    /// copying do not shorten the freeze and memory is most of it), the remaining pages are sent after the process
    /// resumes at the other node. Not with `clone` or `verify`.
    #[serde(default)]
    pub post_copy: bool,
    /// Compare the restored process with the original, by checksums of registers, memory and descriptors, before it
    /// resumes at the other node; the process stays if they differ. The comparison lengthens the freeze.
    #[serde(default)]
    pub verify: bool,
}

/// Answer of `POST /v1/migrations`, status 202: the migration has begun.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MigrationAccepted {
    /// Number of the migration, for `GET /v1/migrations/{id}`.
    pub id: u64,
}

/// Answer of `GET /v1/migrations`: the migrations from this node that the daemon remembers, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MigrationList {
    /// Migrations from this node that the daemon remembers, oldest first.
    pub migrations: Vec<MigrationStatus>,
}

/// Answer of `GET /v1/migrations/{id}`, and of cancelling a migration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MigrationStatus {
    /// Number of the migration at this node.
    pub id: u64,
    /// PID of the process on this node.
    pub pid: i32,
    /// The process's name.
    pub name: String,
    /// Name of the node that takes the process.
    pub to: String,
    /// True for a clone: the original continues here.
    pub clone: bool,
    /// Result of the migration.
    #[serde(flatten)]
    pub outcome: MigrationOutcome,
    /// The last completed round of copying; none before the first.
    pub round: Option<RoundEntry>,
    /// Bytes sent while the process ran.
    pub copied_bytes: u64,
    /// Bytes sent during the freeze.
    pub freeze_bytes: u64,
    /// Bytes saved by compressing memory, in the freeze and before: the donor compresses if the network to the acceptor
    /// is the bottleneck.
    pub saved_bytes: u64,
    /// The last predicted freeze, in microseconds.
    pub predicted_freeze_us: Option<f64>,
    /// Freeze of a process that moved: from the stop until the process resumes at the acceptor, including the way of
    /// the frame that reports it; of a clone: until the original resumes. In microseconds.
    pub freeze_us: Option<f64>,
    /// Connections from a node's own address that are forwarded by the node with that address for as long as they live,
    /// because their other ends run no daemon; written `tcp:LOCAL:PORT-REMOTE:PORT`.
    #[serde(default)]
    pub forwarded: Vec<String>,
    /// Memory sent by post-copy; none without post-copy.
    #[serde(default)]
    pub post_copy: Option<PostCopyMemory>,
    /// Duration of each phase.
    pub phases_us: MigrationPhasesUs,
    /// Duration of each step of the freeze of a process that moved.
    pub steps_us: MigrationStepsUs,
}

/// Progress of the post-copy of a process that runs at the acceptor.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PostCopyMemory {
    /// Bytes that were left at the donor when the process resumed.
    pub bytes: u64,
    /// Bytes of these that were sent.
    pub sent_bytes: u64,
    /// Pages of 4 KiB in `sent_bytes`.
    pub sent_pages: u64,
    /// Number of page faults for which the process waited until the page was sent.
    pub page_faults: u64,
    /// Time from the report that the process resumed until all memory was sent, in microseconds.
    pub duration_us: f64,
    /// The reason that not all memory was sent: the process has ended at the acceptor.
    pub problem: Option<String>,
    /// The party to blame for `problem`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blame: Option<Blame>,
}

/// Result of a migration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum MigrationOutcome {
    /// The migration is in progress.
    Running,
    /// The process runs at the acceptor.
    Moved,
    /// The process still runs here, and a copy of it at the acceptor.
    Cloned,
    /// The process still runs here, and nowhere else.
    Kept {
        /// Reason why the process stayed.
        reason: String,
        /// The party to blame for `reason`.
        blame: Blame,
    },
}

/// A round of copying while the process runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RoundEntry {
    /// Number of the round, from 1.
    pub number: u32,
    /// Bytes sent in the round.
    pub copied_bytes: u64,
    /// Bytes saved by compression.
    pub saved_bytes: u64,
    /// Bytes found changed at the end of the round.
    pub dirty_bytes: u64,
    /// Bytes that the process changes per second.
    pub dirty_bytes_per_s: u64,
    /// Bytes sent to the acceptor per second.
    pub rate_bytes_per_s: u64,
    /// Predicted freeze at this point, in microseconds.
    pub predicted_freeze_us: f64,
}

/// Duration of each phase of a migration, in microseconds. The phases from `extract` on add up to the freeze.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MigrationPhasesUs {
    /// Check, offer and rounds of copying.
    pub copy: f64,
    /// Acceptor and peers prepare.
    pub arm: f64,
    /// The steering table changes.
    pub divert: f64,
    /// The process is stopped, and the rest of its state is sent.
    pub extract: f64,
    /// State is transferred.
    pub transfer: f64,
    /// State is restored at the acceptor.
    pub restore: f64,
    /// Ownership changes, until the process resumes.
    pub commit: f64,
}

/// The steps of a freeze in their order, at two nodes that work concurrently.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MigrationStepsUs {
    /// From the stop of the process until all its state has been sent.
    pub donor: Vec<MigrationStepUs>,
    /// From the first message after the stop until the process resumes; `wait` is the time waiting for more messages.
    pub acceptor: Vec<MigrationStepUs>,
}

/// A step of a freeze.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MigrationStepUs {
    /// Name of the step.
    pub step: String,
    /// Duration, in microseconds.
    pub duration_us: u32,
}

/// A process that was migrated to this node and runs here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ResidentProcess {
    /// The process's PID on this node. Inside its own PID namespace the process keeps its original PID.
    pub pid: i32,
    /// The process's name.
    pub name: String,
    /// Name of the node that the process came from.
    pub from: String,
    /// Total number of the process's moves.
    pub moves: u32,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn documented_requests_are_parsed() {
        let request: MigrationRequest =
            serde_json::from_value(json!({"pid": 4242, "to": "n2"})).unwrap();
        assert_eq!(request.sockets, SocketStrategy::Incremental);
        assert_eq!(
            (request.max_freeze_us, request.clone, request.verify),
            (None, false, false)
        );
        assert!(serde_json::from_value::<MigrationRequest>(json!({"pid": 1})).is_err());
        let misspelt = json!({"pid": 1, "to": "n2", "max_freze_us": 3});
        assert!(serde_json::from_value::<MigrationRequest>(misspelt).is_err());
    }

    #[test]
    fn outcomes_serialize_flat() {
        let status = MigrationStatus {
            id: 1,
            pid: 4242,
            name: "game".into(),
            to: "n2".into(),
            clone: false,
            outcome: MigrationOutcome::Kept {
                reason: "busy".into(),
                blame: Blame::Operator,
            },
            round: None,
            copied_bytes: 0,
            freeze_bytes: 0,
            saved_bytes: 0,
            predicted_freeze_us: None,
            freeze_us: None,
            forwarded: Vec::new(),
            post_copy: None,
            phases_us: MigrationPhasesUs::default(),
            steps_us: MigrationStepsUs::default(),
        };
        let value = serde_json::to_value(&status).unwrap();
        assert_eq!(
            (&value["state"], &value["reason"], &value["blame"]),
            (&json!("kept"), &json!("busy"), &json!("operator"))
        );
        assert_eq!(
            serde_json::from_value::<MigrationStatus>(value).unwrap(),
            status
        );
    }
}
