//! The conductor with arbitrary frames.

use crate::frame::decode;
use holdfast_proto::conductor::{
    Conductor, ConductorConfig, LoadSample, Output, PlacementRules, ProcessSample, RECORDS_MAX,
};
use holdfast_proto::view::View;
use holdfast_wire::conductor_frames::{NodeDemand, OfferId, ProcessKey};
use holdfast_wire::{Frame, NodeId};
use std::time::Duration;

/// The node whose conductor is tested.
pub const NODE: NodeId = NodeId(1);
/// Start number of its daemon.
pub const BOOT: u64 = 1;
/// Most outputs that one input may cause.
const OUTPUTS_MAX: usize = 1_000;
/// Most other nodes whose load a conductor keeps.
const KNOWN_MAX: usize = 128;

/// Feeds a conductor with the frames of the stream, in turn from two nodes of the group and a stranger. The first byte
/// chooses the load of the node (modulo 4, from idle to overloaded), whether it is drained, and the time between two
/// frames. The conductor must not panic, must come to rest, moves its own processes alone, one at a time and within the
/// limit, and keeps a bounded number of loads and records.
pub fn run(data: &[u8]) -> bool {
    let Some((choice, rest)) = data.split_first() else {
        return false;
    };
    let mut daemon = Daemon::new(*choice);
    let mut has_frames = false;
    for (index, frame) in decode(rest, 1 << 20).into_iter().enumerate() {
        let Frame::Conductor(frame) = frame else {
            continue;
        };
        has_frames = true;
        daemon.end_move(index % 3 == 0);
        daemon.now += Duration::from_millis(u64::from(*choice) * 8);
        daemon.measure();
        let sender = [2, 3, 9].map(NodeId)[index % 3];
        daemon.machine.handle_frame(daemon.now, sender, frame);
        daemon.settle();
        daemon.machine.handle_timeout(daemon.now);
        daemon.settle();
        assert!(daemon.machine.known_loads(daemon.now).len() <= KNOWN_MAX);
        assert!(daemon.machine.audit_records().count() <= RECORDS_MAX);
    }
    has_frames
}

struct Daemon {
    machine: Conductor,
    now: Duration,
    processes: Vec<ProcessSample>,
    /// The move under way.
    moving: Option<(OfferId, ProcessKey)>,
    /// Times of all moves.
    begun: Vec<Duration>,
    limit: usize,
}

impl Daemon {
    /// Returns the daemon of a node that started some minutes ago.
    fn new(choice: u8) -> Daemon {
        let mut config = ConductorConfig::new(NODE, BOOT);
        config.calm_down = Duration::from_secs(u64::from(choice / 64));
        let is_drained = choice & 4 != 0;
        let limit = match is_drained {
            true => config.drain_moves_per_minute_max,
            false => config.moves_per_minute_max,
        };
        let view = View::configured(NODE, [1, 2, 3, 4].map(NodeId));
        let process = |number| ProcessSample {
            key: ProcessKey(number),
            used: 30 * u32::from(choice % 4),
            memory_kib: 1 << 10,
            clients: 1,
            freeze: Duration::from_millis(5),
            rules: PlacementRules::default(),
            blocked: None,
        };
        let mut daemon = Daemon {
            machine: Conductor::new(Duration::ZERO, config, view),
            now: Duration::from_secs(120),
            processes: (1..=20).map(process).collect(),
            moving: None,
            begun: Vec::new(),
            limit,
        };
        daemon.measure();
        if is_drained {
            daemon.machine.handle_drain(daemon.now, None);
        }
        daemon.settle();
        daemon
    }

    fn measure(&mut self) {
        let sample = LoadSample {
            demand: NodeDemand {
                used: self.processes.iter().map(|process| process.used).sum(),
                capacity: 1_000,
            },
            memory_free_kib: 1 << 20,
            processes: self.processes.clone(),
        };
        self.machine.handle_sample(self.now, sample);
    }

    fn end_move(&mut self, is_moved: bool) {
        let Some((id, process)) = self.moving.take() else {
            return;
        };
        if is_moved {
            self.processes.retain(|known| known.key != process);
        }
        self.machine.handle_moves_under_way(self.now, 0);
        let fault = holdfast_wire::failure::NodeFault::RestartedInMove;
        let result = match is_moved {
            true => Ok(()),
            false => Err(fault.into()),
        };
        self.machine.handle_move_ended(self.now, id, result);
        self.settle();
    }

    fn settle(&mut self) {
        let mut outputs = 0;
        while let Some(output) = self.machine.poll_output() {
            outputs += 1;
            assert!(outputs < OUTPUTS_MAX, "it never comes to rest");
            match output {
                Output::BeginMove { id, process, to } => {
                    assert!(self.moving.is_none(), "two moves at once");
                    assert!(to != NODE && self.processes.iter().any(|own| own.key == process));
                    self.moving = Some((id, process));
                    self.machine.handle_moves_under_way(self.now, 1);
                    self.begun.push(self.now);
                    let minute = self.now.saturating_sub(Duration::from_secs(60));
                    let recent = self.begun.iter().filter(|at| **at >= minute);
                    assert!(recent.count() <= self.limit, "too many moves in a minute");
                }
                Output::Send { to, .. } => assert!(to != NODE && to.0 <= 4),
                Output::Event(_) => {}
            }
        }
    }
}
