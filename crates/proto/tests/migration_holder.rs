//! The holder changes while a process moves, or is lost after its decision: the claims of donor and acceptor, and the
//! answers that both believe.

use holdfast_proto::migration::{
    Command, Completion, Event, Migration, MigrationMachineConfig, Output, ProcessId,
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

/// Returns the acceptor's report on the end of the move.
fn done(result: Result<Epoch, Failure>) -> Frame {
    let frame = MoveFrame::Done {
        result,
        times: AcceptorPhaseTimes::default(),
        since_resume_us: 0,
        steps: Vec::new(),
    };
    Frame::Move { id: MOVE, frame }
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
    machine.handle_frame(ms(2), ACCEPTOR, done(Ok(3)));
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
    machine.handle_frame(ms(2), ACCEPTOR, done(Ok(3)));
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
    machine.handle_frame(ms(2), ACCEPTOR, done(result));
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

#[test]
fn acceptor_removes_records_of_flows_closed_during_the_move() {
    let mut machine = recovered_acceptor(true);
    outputs(&mut machine);
    assert!(machine.has_arrived(&flow()));
    let closed = OwnershipChange {
        flow: flow(),
        kind: ChangeKind::Remove,
        epoch: EPOCH + 2,
    };
    machine.handle_changes(vec![closed]);
    let changes = vec![closed];
    let reported = Output::Event(Event::ReportChanges { changes });
    assert_eq!(outputs(&mut machine), [reported]);
    let frame = Frame::Move {
        id: MOVE,
        frame: MoveFrame::Released,
    };
    machine.handle_frame(ms(1), DONOR, frame);
    let (_, _, changes) = take_request(&mut machine);
    // The donor may have reported the transit to a new holder, which has not heard of the commit.
    let commit = OwnershipChange {
        kind: ChangeKind::Commit,
        epoch: EPOCH + 1,
        ..closed
    };
    let process = OwnershipChange {
        flow: Flow::process_key(MOVE),
        kind: ChangeKind::Remove,
        epoch: 3,
    };
    assert_eq!(changes, [commit, closed, process]);
}
