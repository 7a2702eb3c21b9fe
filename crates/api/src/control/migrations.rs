//! `GET /v1/units/{unit}`, `GET /v1/processes/{pid}/check`, `POST /v1/migrations`, `GET /v1/migrations`, `GET /v1/migrations/{id}` and
//! `POST /v1/migrations/{id}/cancel`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Answer of `GET /v1/processes/{pid}/check`: can this process move, with all its children, and what would.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ProcessCheck {
    /// The process, as this node sees it.
    pub pid: i32,
    /// What it is called (`comm`).
    pub name: String,
    /// Whether nothing stands in the way here, nor at the node `to`, if that was asked.
    pub movable: bool,
    /// What stands in the way here.
    pub blockers: Vec<BlockerEntry>,
    /// Name of the node that was asked whether it takes the process; none if no node was named, or there are blockers.
    #[serde(default)]
    pub to: Option<String>,
    /// Why a move to that node would be refused, in the words of the move.
    #[serde(default)]
    pub refusals: Vec<String>,
    /// Processes of the tree, the root first.
    pub processes: Vec<i32>,
    /// Threads of all of them.
    pub threads: u64,
    /// Mappings of all of them.
    pub mappings: u64,
    /// Open descriptors of all of them.
    pub descriptors: u64,
    /// TCP and UDP sockets among them.
    pub sockets: u64,
    /// Memory in use, shared memory and files included, bytes.
    pub memory_bytes: u64,
    /// Its connections from a node's own address that would only be forwarded by that node, since their other ends run no daemon;
    /// as `tcp:LOCAL:PORT-REMOTE:PORT`.
    #[serde(default)]
    pub forwarded: Vec<String>,
    /// How long it would stand still, at best, microseconds: what it writes to memory meanwhile comes on top.
    pub predicted_freeze_us: f64,
}

/// The query of `GET /v1/processes/{pid}/check`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CheckQuery {
    /// Name of a node that is asked too whether it takes the process.
    pub to: Option<String>,
}

/// Something of a process that cannot move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct BlockerEntry {
    /// Of which process of the tree.
    pub pid: i32,
    /// Which descriptor, where it is one.
    pub fd: Option<u32>,
    /// What the descriptor leads to.
    pub path: Option<String>,
    /// Why it cannot move, and what to do.
    pub reason: String,
}

/// Answer of `GET /v1/units/{unit}`: the process that a systemd unit is, with all its children.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct UnitEntry {
    /// The unit, such as `game.service`.
    pub unit: String,
    /// Its control group, below the root of all groups.
    pub group: String,
    /// The process whose parent is not of the unit, as this node sees it.
    pub pid: i32,
}

/// How the sockets of a process move: the three ways of the paper.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SocketsWay {
    /// One socket at a time.
    Iterative,
    /// All sockets in one message.
    Collective,
    /// Sockets are made before the freeze; in it, one message has what changed.
    #[default]
    Incremental,
}

/// Body of `POST /v1/migrations`: `{"pid": 4242, "to": "n2"}`. Sent to the node where the process runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MigrationRequest {
    /// The process, which moves with all its children.
    pub pid: i32,
    /// Name of the node that is to take it.
    pub to: String,
    /// How its sockets move.
    #[serde(default)]
    pub sockets: SocketsWay,
    /// A copy is made, and the original goes on here with its connections; where it has some, the copy has connections that were
    /// reset.
    #[serde(default)]
    pub clone: bool,
    /// The longest freeze that may be predicted, microseconds; where none can be had that is short enough, it stays, or its memory
    /// follows.
    #[serde(default)]
    pub max_freeze_us: Option<u64>,
    /// Where the freeze would be longer than `max_freeze_us`, or without that where copying no longer shortens it and memory is the
    /// most of it: memory that is written all the time follows the process when it runs at the other node. Not with `clone` or
    /// `verify`.
    #[serde(default)]
    pub post_copy: bool,
    /// Compare what the other node made of it with the original, by checksums of registers, memory and descriptors, before it
    /// runs there; it stays where they differ. It stands still for longer by that.
    #[serde(default)]
    pub verify: bool,
}

/// Answer of `POST /v1/migrations`, status 202: it has begun.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MigrationAccepted {
    /// For `GET /v1/migrations/{id}`.
    pub id: u64,
}

/// Answer of `GET /v1/migrations`: the migrations from this node that the daemon remembers, the oldest first.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MigrationList {
    /// The migrations.
    pub migrations: Vec<MigrationStatus>,
}

/// Answer of `GET /v1/migrations/{id}`, and of its cancelling.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MigrationStatus {
    /// Its number at this node.
    pub id: u64,
    /// The process, as this node saw it.
    pub pid: i32,
    /// What it is called.
    pub name: String,
    /// Name of the node that is to take it.
    pub to: String,
    /// Whether a copy is made, and the original goes on here.
    pub clone: bool,
    /// What became of it.
    #[serde(flatten)]
    pub outcome: MigrationOutcome,
    /// The last round of copying; none before the first has ended.
    pub round: Option<RoundEntry>,
    /// Bytes sent while the process ran.
    pub copied_bytes: u64,
    /// Bytes sent while it stood still.
    pub freeze_bytes: u64,
    /// Bytes that were sent neither then nor before, since memory was compressed: it is where the way to the acceptor is slower.
    pub saved_bytes: u64,
    /// The freeze that was predicted last, microseconds.
    pub predicted_freeze_us: Option<f64>,
    /// From when it stands still until it runs at the acceptor, with the way of the frame that says so, microseconds; of one
    /// that moved. Of one that was copied, until the original went on.
    pub freeze_us: Option<f64>,
    /// Its connections from a node's own address that only the node with that address forwards from now on, as long as they live:
    /// their other ends run no daemon; as `tcp:LOCAL:PORT-REMOTE:PORT`.
    #[serde(default)]
    pub forwarded: Vec<String>,
    /// Memory that followed it when it ran at the other node already; none if none did.
    #[serde(default)]
    pub followed: Option<FollowedMemory>,
    /// Where the time went.
    pub phases_us: MigrationPhasesUs,
    /// The freeze step by step; of one that moved.
    pub steps_us: MigrationStepsUs,
}

/// Memory that follows a process which runs at the acceptor, so far.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FollowedMemory {
    /// Bytes that were left behind.
    pub bytes: u64,
    /// Bytes of them that were sent.
    pub sent_bytes: u64,
    /// Pages of 4 KiB among them.
    pub sent_pages: u64,
    /// How often the process waited for a page until it was sent.
    pub on_demand: u64,
    /// Since it was known to run there, until all was there, microseconds.
    pub us: f64,
    /// Why not all of it came: the process has ended there.
    pub problem: Option<String>,
}

/// What became of a migration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum MigrationOutcome {
    /// It goes on.
    Running,
    /// The process runs at the acceptor.
    Moved,
    /// The process runs here as before, and a copy of it at the acceptor.
    Cloned,
    /// The process runs here as before, and nowhere else.
    Kept {
        /// Why.
        reason: String,
    },
}

/// A round of copying while the process runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RoundEntry {
    /// Which, from 1 on.
    pub number: u32,
    /// Bytes sent in it.
    pub copied_bytes: u64,
    /// Bytes more that they would have been without compression.
    pub saved_bytes: u64,
    /// Bytes found changed at its end.
    pub dirty_bytes: u64,
    /// Bytes that the process changes in a second.
    pub dirty_bytes_per_s: u64,
    /// Bytes that go to the acceptor in a second.
    pub rate_bytes_per_s: u64,
    /// The freeze, were it now, microseconds.
    pub predicted_freeze_us: f64,
}

/// Time in each step of a migration, microseconds. From `extract` on they add up to the freeze.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MigrationPhasesUs {
    /// Check, offer and rounds of copying.
    pub copy: f64,
    /// Acceptor and peers prepare.
    pub arm: f64,
    /// The steering table changes.
    pub divert: f64,
    /// The process is stopped, and what is left is sent.
    pub extract: f64,
    /// On its way.
    pub transfer: f64,
    /// Put together at the acceptor.
    pub restore: f64,
    /// Ownership changed, until it runs.
    pub commit: f64,
}

/// The steps of a freeze in their order, at two nodes that work at the same time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MigrationStepsUs {
    /// From when it is stopped until all has been sent.
    pub donor: Vec<MigrationStepUs>,
    /// From the first message that came after that until it runs; `wait` is for more of them.
    pub acceptor: Vec<MigrationStepUs>,
}

/// A step of a freeze.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MigrationStepUs {
    /// What was done.
    pub step: String,
    /// How long it took, microseconds.
    pub us: u32,
}

/// A process that came to this node by migration and runs here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ResidentProcess {
    /// Its PID on this node. In its own PID namespace it has the PID it began with.
    pub pid: i32,
    /// What it is called.
    pub name: String,
    /// Name of the node it came from.
    pub from: String,
    /// How often it has moved in all.
    pub moves: u32,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn requests_read_as_documented() {
        let request: MigrationRequest =
            serde_json::from_value(json!({"pid": 4242, "to": "n2"})).unwrap();
        assert_eq!(request.sockets, SocketsWay::Incremental);
        assert_eq!(
            (request.max_freeze_us, request.clone, request.verify),
            (None, false, false)
        );
        assert!(serde_json::from_value::<MigrationRequest>(json!({"pid": 1})).is_err());
        let misspelt = json!({"pid": 1, "to": "n2", "max_freze_us": 3});
        assert!(serde_json::from_value::<MigrationRequest>(misspelt).is_err());
    }

    #[test]
    fn outcomes_are_flat() {
        let status = MigrationStatus {
            id: 1,
            pid: 4242,
            name: "game".into(),
            to: "n2".into(),
            clone: false,
            outcome: MigrationOutcome::Kept {
                reason: "busy".into(),
            },
            round: None,
            copied_bytes: 0,
            freeze_bytes: 0,
            saved_bytes: 0,
            predicted_freeze_us: None,
            freeze_us: None,
            forwarded: Vec::new(),
            followed: None,
            phases_us: MigrationPhasesUs::default(),
            steps_us: MigrationStepsUs::default(),
        };
        let value = serde_json::to_value(&status).unwrap();
        assert_eq!(
            (&value["state"], &value["reason"]),
            (&json!("kept"), &json!("busy"))
        );
        assert_eq!(
            serde_json::from_value::<MigrationStatus>(value).unwrap(),
            status
        );
    }
}
