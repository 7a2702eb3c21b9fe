//! The holder changes while a process moves, or is lost after its decision: the claims of donor and acceptor, and the
//! answers that both believe.

use holdfast_proto::migration::{
    Command, CommandToken, Completion, Event, Migration, MigrationMachineConfig, Output, ProcessId,
    RecoveredMove, RecoveredMoveRole, Results,
};
use holdfast_proto::view::View;
use holdfast_wire::failure::{Failure, NodeFault};
use holdfast_wire::frame::AcceptorPhaseTimes;
use holdfast_wire::move_frames::{DonorFlowEpoch, MoveFrame};
use holdfast_wire::{
    ChangeKind, ChangeRefusal, Epoch, Flow, Frame, MoveId, NodeId, OwnershipChange, OwnershipRecord,
};
use std::time::Duration;

const DONOR: NodeId = NodeId(1);
const ACCEPTOR: NodeId = NodeId(2);
const HOLDER: NodeId = NodeId(3);
const NEXT_HOLDER: NodeId = NodeId(4);
const NODES: [NodeId; 4] = [DONOR, ACCEPTOR, HOLDER, NEXT_HOLDER];

const MOVE: MoveId = MoveId {
    donor: DONOR,
    boot: 1,
    seq: 1,
};

/// A later move of the same process, from the acceptor on.
const SECOND_MOVE: MoveId = MoveId {
    donor: ACCEPTOR,
    ..MOVE
};

/// Epoch at which the donor owned the flow.
const EPOCH: u32 = 5;

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn flow() -> Flow {
    "tcp:10.0.0.1:80-10.0.1.2:4242".parse().expect("a flow")
}

fn view(epoch: u64, holder: NodeId) -> View {
    View {
        epoch,
        ..View::configured(holder, NODES)
    }
}

/// Returns a machine that has found a move of a process with one flow in its saved state.
fn recovered(node: NodeId, role: RecoveredMoveRole) -> Migration {
    let config = MigrationMachineConfig::new(node, 9);
    let mut machine = Migration::new(config, view(1, HOLDER));
    let found = RecoveredMove {
        id: MOVE,
        hops: 0,
        role,
    };
    machine.handle_recovered(ms(0), vec![found]);
    machine
}

fn recovered_donor() -> Migration {
    let role = RecoveredMoveRole::Donor {
        process: ProcessId(7),
        to: ACCEPTOR,
        clone: false,
        saved_flows: Some((flows(), Vec::new())),
        maybe_stopped: true,
    };
    recovered(DONOR, role)
}

fn recovered_acceptor(resumed: bool) -> Migration {
    let role = RecoveredMoveRole::Acceptor {
        restored: Some((flows(), Vec::new())),
        committed: resumed,
        resumed,
    };
    recovered(ACCEPTOR, role)
}

fn flows() -> Vec<DonorFlowEpoch> {
    let epoch = EPOCH;
    vec![DonorFlowEpoch {
        flow: flow(),
        epoch,
    }]
}

fn outputs(machine: &mut Migration) -> Vec<Output> {
    std::iter::from_fn(|| machine.poll_output()).collect()
}

/// Returns the only request among the outputs: its receiver, number and changes.
fn take_request(machine: &mut Migration) -> (NodeId, u64, Vec<OwnershipChange>) {
    let requests = outputs(machine)
        .into_iter()
        .filter_map(|output| match output {
            Output::Send {
                to,
                frame: Frame::ChangeRequest { request, changes },
            } => Some((to, request, changes)),
            _ => None,
        });
    let mut requests: Vec<_> = requests.collect();
    assert_eq!(requests.len(), 1, "{requests:?}");
    requests.remove(0)
}

/// Returns an acceptor's report on the end of a move.
fn done(id: MoveId, result: Result<Epoch, Failure>) -> Frame {
    let frame = MoveFrame::Done {
        result,
        times: AcceptorPhaseTimes::default(),
        since_resume_us: 0,
        steps: Vec::new(),
    };
    Frame::Move { id, frame }
}

/// Returns the answer by which the acceptor owns the process and its flow.
fn committed(request: u64) -> Frame {
    let process = OwnershipRecord::owned(ACCEPTOR, 3);
    let flow = OwnershipRecord::owned(ACCEPTOR, EPOCH + 2);
    let results = vec![Ok(Some(process)), Ok(Some(flow))];
    Frame::ChangeResponse { request, results }
}

fn has_command(outputs: &[Output], is_wanted: fn(&Command) -> bool) -> bool {
    let mut commands = outputs.iter().filter_map(|output| match output {
        Output::Execute(command) => Some(command),
        _ => None,
    });
    commands.any(is_wanted)
}

#[test]
fn answer_of_earlier_term_is_ignored() {
    let mut machine = recovered_acceptor(false);
    let (to, first, _) = take_request(&mut machine);
    assert_eq!(to, HOLDER);
    machine.handle_view(ms(1), view(2, NEXT_HOLDER));
    let (to, second, _) = take_request(&mut machine);
    assert_eq!(to, NEXT_HOLDER);
    machine.handle_view(ms(2), view(3, HOLDER));
    let (to, third, _) = take_request(&mut machine);
    assert_eq!(to, HOLDER);
    assert!(first != second && second != third);
    // The holder of the term in between may have let the donor take the process back.
    machine.handle_frame(ms(3), HOLDER, committed(first));
    let ignored = outputs(&mut machine);
    assert!(
        matches!(ignored[..], [Output::Event(Event::Ignored(_))]),
        "{ignored:?}"
    );
    machine.handle_frame(ms(4), HOLDER, committed(third));
    let resumed = outputs(&mut machine);
    assert!(has_command(&resumed, |command| matches!(
        command,
        Command::Resume { .. }
    )));
}

#[test]
fn donor_keeps_original_until_acceptor_knows_of_commit() {
    let mut machine = recovered_donor();
    let (_, request, _) = take_request(&mut machine);
    let process = Some(OwnershipRecord::owned(ACCEPTOR, 3));
    let flow_record = Some(OwnershipRecord::owned(ACCEPTOR, EPOCH + 2));
    let refused = [process, flow_record].map(|current| Err(ChangeRefusal { current }));
    let results = refused.to_vec();
    machine.handle_frame(ms(1), HOLDER, Frame::ChangeResponse { request, results });
    let waiting = outputs(&mut machine);
    let is_release = |command: &Command| matches!(command, Command::Release { .. });
    assert!(!has_command(&waiting, is_release), "{waiting:?}");
    // A new holder hears from the donor that the acceptor has process and flow.
    let claims = machine.ownership_claims();
    assert!(
        claims.contains(&(Flow::process_key(MOVE), process)),
        "{claims:?}"
    );
    assert!(claims.contains(&(flow(), flow_record)), "{claims:?}");
    machine.handle_frame(ms(2), ACCEPTOR, done(MOVE, Ok(3)));
    assert!(has_command(&outputs(&mut machine), is_release));
}

#[test]
fn donor_in_doubt_keeps_flow_that_was_rolled_back() {
    let mut machine = recovered_donor();
    let (_, request, _) = take_request(&mut machine);
    // The holder lost its table; the donor has reported the flow as its own, closed before the freeze.
    let epoch = EPOCH + 2;
    let records = [None, Some(OwnershipRecord::owned(DONOR, epoch))];
    let results = records
        .map(|current| Err(ChangeRefusal { current }))
        .to_vec();
    machine.handle_frame(ms(1), HOLDER, Frame::ChangeResponse { request, results });
    outputs(&mut machine);
    machine.handle_frame(ms(2), ACCEPTOR, done(MOVE, Ok(3)));
    let released = outputs(&mut machine);
    assert!(
        has_command(
            &released,
            |command| matches!(command, Command::Release { flows, kept, .. }
            if flows.is_empty() && kept.len() == 1 && kept[0].epoch == EPOCH + 2)
        ),
        "{released:?}"
    );
}

#[test]
fn donor_in_doubt_asks_the_holder_again_when_the_acceptor_gives_up() {
    let mut machine = recovered_donor();
    let (_, request, _) = take_request(&mut machine);
    let results = vec![Err(ChangeRefusal { current: None }); 2];
    machine.handle_frame(ms(1), HOLDER, Frame::ChangeResponse { request, results });
    outputs(&mut machine);
    // The holder has restarted, and has decided the acceptor's rollback by the reports of both.
    let result = Err(NodeFault::RestartedBeforeMoveCommit.into());
    machine.handle_frame(ms(2), ACCEPTOR, done(MOVE, result));
    let (_, request, changes) = take_request(&mut machine);
    assert_eq!(changes[0].kind, ChangeKind::Rollback);
    let records = [(DONOR, 3), (DONOR, EPOCH + 2)];
    let owned = records.map(|(node, epoch)| Ok(Some(OwnershipRecord::owned(node, epoch))));
    let results = owned.to_vec();
    machine.handle_frame(ms(3), HOLDER, Frame::ChangeResponse { request, results });
    let thawing = outputs(&mut machine);
    let token = thawing.iter().find_map(|output| match output {
        Output::Execute(Command::Thaw { token, .. }) => Some(*token),
        _ => None,
    });
    let token = token.expect("the process is resumed");
    let results = Results::Thawed(Ok(()));
    machine.handle_completion(ms(4), Completion { token, results });
    let (_, _, changes) = take_request(&mut machine);
    assert_eq!((changes[0].kind, changes[0].epoch), (ChangeKind::Remove, 3));
}

#[test]
fn donor_of_frozen_clone_without_flows_claims_its_transit() {
    let claims_if = |maybe_stopped| {
        let role = RecoveredMoveRole::Donor {
            process: ProcessId(7),
            to: ACCEPTOR,
            clone: true,
            saved_flows: Some((Vec::new(), Vec::new())),
            maybe_stopped,
        };
        recovered(DONOR, role).ownership_claims()
    };
    // A new holder must not let the donor take the clone back before the acceptor has reported.
    let transit = OwnershipRecord::transit(DONOR, ACCEPTOR, 2);
    assert_eq!(claims_if(true), [(Flow::process_key(MOVE), Some(transit))]);
    assert_eq!(claims_if(false), []);
}

#[test]
fn donor_ends_original_if_acceptor_has_left_the_group() {
    let mut machine = recovered_donor();
    let (_, request, _) = take_request(&mut machine);
    let without_acceptor = View {
        epoch: 2,
        ..View::configured(HOLDER, [DONOR, HOLDER])
    };
    machine.handle_view(ms(1), without_acceptor);
    let current = Some(OwnershipRecord::owned(ACCEPTOR, 3));
    let results = vec![Err(ChangeRefusal { current }); 2];
    machine.handle_frame(ms(2), HOLDER, Frame::ChangeResponse { request, results });
    assert!(has_command(&outputs(&mut machine), |command| matches!(
        command,
        Command::Release { .. }
    )));
}

/// Returns the acceptor of the move, which has been moving the process on to the next holder since. The second move's
/// request to the holder is answered with `process` as the process's record, and an owner of the flow two epochs later.
fn acceptor_and_donor_of_second_move(process: OwnershipRecord) -> Migration {
    let flow_epoch = DonorFlowEpoch {
        flow: flow(),
        epoch: EPOCH + 2,
    };
    let role = RecoveredMoveRole::Donor {
        process: ProcessId(7),
        to: NEXT_HOLDER,
        clone: false,
        saved_flows: Some((vec![flow_epoch], Vec::new())),
        maybe_stopped: true,
    };
    let first = RecoveredMoveRole::Acceptor {
        restored: Some((flows(), Vec::new())),
        committed: true,
        resumed: true,
    };
    let found = |(id, role)| RecoveredMove { id, hops: 0, role };
    let config = MigrationMachineConfig::new(ACCEPTOR, 9);
    let mut machine = Migration::new(config, view(1, HOLDER));
    let moves = [(MOVE, first), (SECOND_MOVE, role)].map(found);
    machine.handle_recovered(ms(0), moves.to_vec());
    let (_, request, _) = take_request(&mut machine);
    let flow_record = OwnershipRecord {
        epoch: EPOCH + 4,
        ..process
    };
    let results = [process, flow_record].map(|current| Ok(Some(current)));
    let results = results.to_vec();
    machine.handle_frame(ms(1), HOLDER, Frame::ChangeResponse { request, results });
    machine
}

fn removal(epoch: u32) -> OwnershipChange {
    OwnershipChange {
        flow: flow(),
        kind: ChangeKind::Remove,
        epoch,
    }
}

/// Checks that the acceptor of the move has the flow's record removed, whatever the holder has heard, once the donor has
/// released the process.
fn assert_flow_ends_with_move(mut machine: Migration) {
    outputs(&mut machine);
    let frame = Frame::Move {
        id: MOVE,
        frame: MoveFrame::Released,
    };
    machine.handle_frame(ms(9), DONOR, frame);
    let (_, _, changes) = take_request(&mut machine);
    // The donor may have reported the transit to a new holder, which has not heard of the commit.
    let removal = removal(EPOCH + 2);
    let commit = OwnershipChange {
        kind: ChangeKind::Commit,
        epoch: EPOCH + 1,
        ..removal
    };
    let process = OwnershipChange {
        flow: Flow::process_key(MOVE),
        kind: ChangeKind::Remove,
        epoch: 3,
    };
    assert_eq!(changes, [commit, removal, process]);
}

/// Returns the token of the command that `token` returns one for.
fn take_token(
    machine: &mut Migration,
    token: impl Fn(&Command) -> Option<CommandToken>,
) -> CommandToken {
    let outputs = outputs(machine);
    let found = outputs.iter().find_map(|output| match output {
        Output::Execute(command) => token(command),
        _ => None,
    });
    found.expect("the command is given")
}

#[test]
fn acceptor_removes_records_of_flows_closed_during_the_move() {
    let mut machine = recovered_acceptor(true);
    outputs(&mut machine);
    assert!(machine.has_arrived(&flow()));
    let changes = vec![removal(EPOCH + 2)];
    machine.handle_changes(changes.clone());
    let reported = Output::Event(Event::ReportChanges { changes });
    assert_eq!(outputs(&mut machine), [reported]);
    assert_flow_ends_with_move(machine);
}

#[test]
fn acceptor_removes_records_of_flows_closed_during_a_move_that_fails() {
    let mut machine = acceptor_and_donor_of_second_move(OwnershipRecord::owned(ACCEPTOR, 3));
    machine.handle_changes(vec![removal(EPOCH + 2)]);
    let token = take_token(&mut machine, |command| match command {
        Command::Thaw { token, .. } => Some(*token),
        _ => None,
    });
    let results = Results::Thawed(Ok(()));
    machine.handle_completion(ms(2), Completion { token, results });
    assert_flow_ends_with_move(machine);
}

#[test]
fn acceptor_removes_records_of_flows_that_have_moved_on() {
    let mut machine = acceptor_and_donor_of_second_move(OwnershipRecord::owned(NEXT_HOLDER, 3));
    machine.handle_frame(ms(2), NEXT_HOLDER, done(SECOND_MOVE, Ok(3)));
    let token = take_token(&mut machine, |command| match command {
        Command::Release { token, .. } => Some(*token),
        _ => None,
    });
    let results = Results::Released(Ok(()));
    machine.handle_completion(ms(3), Completion { token, results });
    assert_flow_ends_with_move(machine);
}
