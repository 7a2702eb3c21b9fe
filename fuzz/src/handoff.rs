//! The handoff machine with arbitrary frames.

use crate::frame::decode;
use bytes::Bytes;
use holdfast_proto::flow_ownership;
use holdfast_proto::handoff::{
    Command, CommandToken, Completion, DrainPolicy, FlowHandoffRequest, FrozenFlow, Handoff,
    HandoffMachineConfig, Output, Results, SendQueueInfo, StaticFlow,
};
use holdfast_proto::view::View;
use holdfast_wire::{Flow, NodeId};
use std::time::Duration;

/// Feeds a machine that gives some flows away with the frames of the stream, alternately from its two peers, and
/// executes each command at once. The machine must not panic, and must come to rest, whatever the frames say.
pub fn run(data: &[u8]) -> bool {
    let Some((choice, rest)) = data.split_first() else {
        return false;
    };
    let holder = NodeId(u16::from(choice % 3) + 1);
    let view = View::configured(holder, [1, 2, 3].map(NodeId));
    let mut machine = Handoff::new(HandoffMachineConfig::new(NodeId(1), 1), view);
    let mut now = Duration::ZERO;
    let flows = (1..4).map(flow).collect();
    let request = FlowHandoffRequest {
        flows,
        to: NodeId(2),
        drain: DrainPolicy::Yes,
    };
    machine
        .handle_request(now, request)
        .expect("node 2 is known");
    execute_commands(&mut machine, now);
    let frames = decode(rest, 1 << 20);
    let has_frames = !frames.is_empty();
    for (index, frame) in frames.into_iter().enumerate() {
        now += Duration::from_millis(u64::from(*choice));
        let from = NodeId(2 + (index as u16 + u16::from(choice / 64)) % 2);
        machine.handle_frame(now, from, frame);
        execute_commands(&mut machine, now);
        if machine.poll_timeout().is_some_and(|due| due <= now) {
            machine.handle_timeout(now);
            execute_commands(&mut machine, now);
        }
    }
    machine.handle_peer_lost(now, NodeId(2));
    machine.handle_peer_lost(now, NodeId(3));
    execute_commands(&mut machine, now);
    has_frames
}

/// Returns a flow that corpus and request share.
pub fn flow(port: u16) -> Flow {
    let text = format!("tcp:10.0.0.1:80-10.0.1.2:{port}");
    text.parse().expect("a flow")
}

fn execute_commands(machine: &mut Handoff, now: Duration) {
    let mut steps = 0;
    while let Some(output) = machine.poll_output() {
        steps += 1;
        assert!(steps < 1_000_000, "it never comes to rest");
        if let Output::Execute(command) = output {
            let (token, results) = results(&command);
            machine.handle_completion(now, Completion { token, results });
        }
    }
}

/// Returns success, except that the holder knows no flow.
fn results(command: &Command) -> (CommandToken, Results) {
    match command {
        Command::ReadStatic { token, flows } => {
            let state = StaticFlow {
                epoch: 1,
                static_state: Bytes::from_static(b"static"),
                queue: SendQueueInfo::default(),
            };
            (*token, Results::ReadStatic(vec![Ok(state); flows.len()]))
        }
        Command::Drain { token, flows, .. } => (
            *token,
            Results::Drained(vec![SendQueueInfo::default(); flows.len()]),
        ),
        Command::Freeze { token, flows, .. } => {
            let state = FrozenFlow {
                dynamic: Bytes::from_static(b"dynamic"),
                application: Bytes::new(),
            };
            (*token, Results::Frozen(vec![Ok(state); flows.len()]))
        }
        Command::Resume { token, flows, .. } => {
            (*token, Results::Resumed(vec![Ok(()); flows.len()]))
        }
        Command::Close { token, flows, .. } => (*token, Results::Closed(vec![Ok(()); flows.len()])),
        Command::PrepareSockets { token, flows, .. } => {
            (*token, Results::PreparedSockets(vec![Ok(()); flows.len()]))
        }
        Command::Restore { token, flows, .. } => {
            (*token, Results::Restored(vec![Ok(()); flows.len()]))
        }
        Command::Activate { token, flows } => {
            (*token, Results::Activated(vec![Ok(()); flows.len()]))
        }
        Command::Discard { token, .. } => (*token, Results::Discarded),
        Command::Arbitrate {
            token,
            asker,
            changes,
        } => {
            let apply = |change| flow_ownership::apply_change(None, change, *asker);
            (
                *token,
                Results::Arbitrated(changes.iter().map(apply).collect()),
            )
        }
        Command::Lookup { token, flows } => (*token, Results::LookedUp(vec![None; flows.len()])),
    }
}
