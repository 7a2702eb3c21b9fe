use super::statements::Statements;
use super::*;
use crate::flow_ownership::disputed_record;
use holdfast_wire::ChangeKind;
use std::collections::BTreeSet;

const FORMER: NodeId = NodeId(1);
const HOLDER: NodeId = NodeId(2);
const DONOR: NodeId = NodeId(3);
const ACCEPTOR: NodeId = NodeId(4);
const TERM: u64 = 7;
const BOOT: u64 = 1_000;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn flow(port: u16) -> Flow {
    format!("tcp:10.0.0.1:80-10.0.1.2:{port}")
        .parse()
        .expect("a flow")
}

/// The view in which the holder has replaced the former one.
fn view(epoch: u64) -> View {
    View {
        epoch,
        revision: 0,
        contact_node: HOLDER,
        backups: vec![DONOR],
        server_nodes: BTreeSet::from([ACCEPTOR]),
    }
}

fn former_view() -> View {
    View {
        epoch: TERM - 1,
        contact_node: FORMER,
        backups: vec![HOLDER, DONOR],
        ..view(TERM)
    }
}

fn machine(node: NodeId) -> TableRebuild {
    let config = TableRebuildConfig {
        flows_per_part: 2,
        ..TableRebuildConfig::new(node, BOOT)
    };
    TableRebuild::new(ms(0), config, former_view(), false)
}

/// The holder, with its own empty report complete.
fn holder() -> TableRebuild {
    holder_with(&[])
}

/// The holder, with its own report of these claims complete.
fn holder_with(claims: &[Claim]) -> TableRebuild {
    let mut holder = machine(HOLDER);
    holder.handle_view(ms(0), view(TERM));
    assert_eq!(
        holder.poll_output(),
        Some(Output::Execute(Command::ClearTable))
    );
    let requests: Vec<NodeId> = (0..2).map(|_| requested(&mut holder)).collect();
    assert_eq!(requests, [DONOR, ACCEPTOR]);
    report_own(&mut holder, claims);
    let last = outputs(&mut holder).pop();
    assert_eq!(last, Some(settled(HOLDER)));
    holder
}

fn requested(machine: &mut TableRebuild) -> NodeId {
    match machine.poll_output() {
        Some(Output::Send {
            to,
            frame: Frame::FlowReport(FlowReportFrame::Request { term: TERM }),
        }) => to,
        other => panic!("no request: {other:?}"),
    }
}

/// Answers the commands that read a node's own claims, which are all of the flows.
fn report_own(machine: &mut TableRebuild, claims: &[Claim]) {
    let Some(Output::Execute(Command::ListFlows { token })) = machine.poll_output() else {
        panic!("no list wanted");
    };
    machine.handle_flows(token, claims.iter().map(|(flow, _)| *flow).collect());
    read_own(machine, claims);
}

fn read_own(machine: &mut TableRebuild, claims: &[Claim]) {
    let Some(Output::Execute(Command::ReadClaims { token, flows })) = machine.poll_output() else {
        panic!("no claims wanted");
    };
    let read = claims.iter().filter(|(flow, _)| flows.contains(flow));
    machine.handle_claims(token, read.copied().collect());
}

fn settled(node: NodeId) -> Output {
    Output::Event(Event::NodeSettled { node })
}

fn outputs(machine: &mut TableRebuild) -> Vec<Output> {
    std::iter::from_fn(|| machine.poll_output()).collect()
}

fn report(claims: Vec<Claim>) -> FlowReportFrame {
    FlowReportFrame::Report {
        term: TERM,
        report: 5,
        part: 0,
        claims,
        is_last: true,
    }
}

fn change(kind: ChangeKind, epoch: u32) -> [OwnershipChange; 1] {
    let flow = flow(1);
    [OwnershipChange { flow, kind, epoch }]
}

fn is_command(output: &Output) -> bool {
    matches!(output, Output::Execute(_))
}

fn transit() -> Claim {
    (flow(1), OwnershipRecord::transit(DONOR, ACCEPTOR, 5))
}

#[test]
fn holder_is_ready_when_all_nodes_have_reported() {
    let mut holder = holder();
    let owned = vec![(flow(1), OwnershipRecord::owned(DONOR, 3))];
    holder.handle_frame(ms(1), DONOR, report(owned.clone()));
    let stored = outputs(&mut holder);
    assert!(stored.contains(&Output::Execute(Command::StoreNewer { records: owned })));
    assert!(stored.contains(&settled(DONOR)) && !holder.is_ready());
    holder.handle_frame(ms(2), ACCEPTOR, report(Vec::new()));
    let last = outputs(&mut holder);
    let ready = Output::Event(Event::Ready {
        missing: Vec::new(),
    });
    assert!(last.contains(&ready) && last.contains(&Output::Event(Event::Complete)));
    assert!(holder.is_ready() && holder.is_complete());
    assert_eq!(holder.poll_timeout(), None);
}

#[test]
fn silent_node_delays_service_for_a_bounded_time() {
    let mut holder = holder();
    holder.handle_frame(ms(1), DONOR, report(Vec::new()));
    outputs(&mut holder);
    holder.handle_timeout(ms(100));
    let late = outputs(&mut holder);
    let missing = vec![ACCEPTOR];
    assert!(late.contains(&Output::Event(Event::Ready { missing })));
    assert!(holder.is_ready() && !holder.is_complete());
    assert_eq!(holder.admit_query(), Admission::Deferred);
    let again = holder.poll_timeout().expect("asks again");
    holder.handle_timeout(again);
    assert_eq!(requested(&mut holder), ACCEPTOR);
}

#[test]
fn requests_wait_for_report_of_asker() {
    let mut holder = holder();
    let establish = change(ChangeKind::Establish, 1);
    assert_eq!(holder.admit(DONOR, &establish), Admission::Deferred);
    holder.handle_frame(ms(1), DONOR, report(Vec::new()));
    assert_eq!(holder.admit(DONOR, &establish), Admission::Admitted);
    assert_eq!(holder.admit(ACCEPTOR, &establish), Admission::Deferred);
}

#[test]
fn transit_is_decided_after_reports_of_both_parties() {
    let mut holder = holder();
    holder.handle_frame(ms(1), DONOR, report(vec![transit()]));
    let rollback = change(ChangeKind::Rollback, 5);
    assert_eq!(holder.admit(DONOR, &rollback), Admission::Deferred);
    holder.handle_frame(ms(2), ACCEPTOR, report(vec![transit()]));
    assert_eq!(holder.admit(DONOR, &rollback), Admission::Admitted);
}

#[test]
fn rollback_waits_for_report_of_the_node_to_which_acceptor_has_given_the_flow() {
    let given = (flow(1), OwnershipRecord::owned(ACCEPTOR, 8));
    let mut holder = holder_with(&[given]);
    let claim = (flow(1), OwnershipRecord::transit(DONOR, HOLDER, 5));
    holder.handle_frame(ms(1), DONOR, report(vec![claim]));
    let rollback = change(ChangeKind::Rollback, 5);
    assert_eq!(holder.admit(DONOR, &rollback), Admission::Deferred);
    holder.handle_frame(ms(2), ACCEPTOR, report(vec![given]));
    assert_eq!(holder.admit(DONOR, &rollback), Admission::Admitted);
}

#[test]
fn transit_is_decided_when_other_party_leaves_the_view() {
    let mut holder = holder();
    holder.handle_frame(ms(1), DONOR, report(vec![transit()]));
    let without_acceptor = View {
        server_nodes: BTreeSet::new(),
        ..view(TERM + 1)
    };
    holder.handle_view(ms(2), without_acceptor);
    let rollback = change(ChangeKind::Rollback, 5);
    assert_eq!(holder.admit(DONOR, &rollback), Admission::Admitted);
    assert!(holder.is_complete());
}

#[test]
fn claim_of_acceptor_becomes_record_when_donor_yields() {
    let mut holder = holder();
    holder.handle_frame(ms(1), ACCEPTOR, report(vec![transit()]));
    let commit = change(ChangeKind::Commit, 5);
    assert_eq!(holder.admit(ACCEPTOR, &commit), Admission::Deferred);
    assert!(!outputs(&mut holder).iter().any(is_command));
    let yielded = (flow(1), OwnershipRecord::owned(ACCEPTOR, 6));
    holder.handle_frame(ms(2), DONOR, report(vec![yielded]));
    let records = vec![yielded];
    let store = Output::Execute(Command::StoreNewer { records });
    assert!(outputs(&mut holder).contains(&store));
    assert_eq!(holder.admit(ACCEPTOR, &commit), Admission::Admitted);
    assert_eq!(outputs(&mut holder), []);
}

#[test]
fn claim_of_acceptor_alone_is_no_record_if_donor_does_not_yield() {
    let mut holder = holder();
    holder.handle_frame(ms(1), ACCEPTOR, report(vec![transit()]));
    // The donor may have rolled the transit back and closed the flow.
    holder.handle_frame(ms(2), DONOR, report(Vec::new()));
    outputs(&mut holder);
    let commit = change(ChangeKind::Commit, 5);
    assert_eq!(holder.admit(ACCEPTOR, &commit), Admission::Admitted);
    assert_eq!(outputs(&mut holder), []);
}

#[test]
fn claim_of_acceptor_becomes_record_if_donor_is_outside_of_the_view() {
    let mut holder = holder();
    let of_former = OwnershipRecord::transit(FORMER, ACCEPTOR, 5);
    holder.handle_frame(ms(1), ACCEPTOR, report(vec![(flow(1), of_former)]));
    outputs(&mut holder);
    let commit = change(ChangeKind::Commit, 5);
    assert_eq!(holder.admit(ACCEPTOR, &commit), Admission::Admitted);
    let records = vec![(flow(1), of_former)];
    let store = Output::Execute(Command::StoreMissing { records });
    assert_eq!(outputs(&mut holder), [store]);
}

#[test]
fn claim_of_acceptor_alone_ends_with_its_rollback() {
    let mut holder = holder();
    holder.handle_frame(ms(1), ACCEPTOR, report(vec![transit()]));
    holder.handle_frame(ms(2), DONOR, report(Vec::new()));
    outputs(&mut holder);
    let rollback = change(ChangeKind::Rollback, 5);
    assert_eq!(holder.admit(ACCEPTOR, &rollback), Admission::Admitted);
    assert_eq!(outputs(&mut holder), []);
}

#[test]
fn removed_flow_does_not_come_back_by_late_report_of_its_donor() {
    let mut holder = holder();
    let owned = vec![(flow(1), OwnershipRecord::owned(ACCEPTOR, 6))];
    holder.handle_frame(ms(1), ACCEPTOR, report(owned));
    let remove = change(ChangeKind::Remove, 6);
    assert_eq!(holder.admit(ACCEPTOR, &remove), Admission::Admitted);
    outputs(&mut holder);
    holder.handle_frame(ms(2), DONOR, report(vec![transit()]));
    let late = outputs(&mut holder);
    assert!(
        !late
            .iter()
            .any(|output| matches!(output, Output::Execute(_)))
    );
}

#[test]
fn repeated_report_is_acknowledged_and_stores_nothing() {
    let mut holder = holder();
    holder.handle_frame(ms(1), ACCEPTOR, report(Vec::new()));
    holder.handle_frame(ms(1), DONOR, report(vec![transit()]));
    outputs(&mut holder);
    // The flow may have moved and ended since.
    holder.handle_frame(ms(2), DONOR, report(vec![transit()]));
    let ack = FlowReportFrame::Ack {
        term: TERM,
        report: 5,
        next_part: 1,
    };
    let answer = Output::Send {
        to: DONOR,
        frame: Frame::FlowReport(ack),
    };
    assert_eq!(outputs(&mut holder), [answer]);
}

#[test]
fn flows_that_donor_has_yielded_are_committed_with_its_report() {
    let mut holder = holder();
    let process: Flow = Flow::process_key(holdfast_wire::MoveId {
        donor: DONOR,
        boot: 1,
        seq: 1,
    });
    let moving = (process, OwnershipRecord::transit(DONOR, ACCEPTOR, 2));
    let other = (flow(2), OwnershipRecord::transit(DONOR, ACCEPTOR, 5));
    holder.handle_frame(ms(1), ACCEPTOR, report(vec![moving, transit(), other]));
    outputs(&mut holder);
    let yielded = vec![
        (process, OwnershipRecord::owned(ACCEPTOR, 3)),
        (flow(1), OwnershipRecord::owned(ACCEPTOR, 6)),
    ];
    holder.handle_frame(ms(2), DONOR, report(yielded.clone()));
    let store = Output::Execute(Command::StoreNewer { records: yielded });
    assert!(outputs(&mut holder).contains(&store));
}

#[test]
fn claims_about_flows_of_others_are_ignored() {
    let mut holder = holder();
    let foreign = vec![(flow(1), OwnershipRecord::transit(FORMER, ACCEPTOR, 3))];
    holder.handle_frame(ms(1), DONOR, report(foreign));
    let all = outputs(&mut holder);
    assert!(
        !all.iter()
            .any(|output| matches!(output, Output::Execute(_)))
    );
    assert!((all.iter()).any(|output| matches!(output, Output::Event(Event::Ignored(_)))));
}

#[test]
fn report_has_parts_that_wait_for_each_other() {
    let mut node = machine(DONOR);
    node.handle_view(ms(0), view(TERM));
    node.handle_frame(ms(0), HOLDER, FlowReportFrame::Request { term: TERM });
    let owned = OwnershipRecord::owned(DONOR, 3);
    let claims = [1, 2, 3].map(|port| (flow(port), owned));
    report_own(&mut node, &claims);
    let part = |part, claims: &[Claim], is_last| Output::Send {
        to: HOLDER,
        frame: Frame::FlowReport(FlowReportFrame::Report {
            term: TERM,
            report: BOOT + 1,
            part,
            claims: claims.to_vec(),
            is_last,
        }),
    };
    assert_eq!(node.poll_output(), Some(part(0, &claims[..2], false)));
    assert_eq!(node.poll_output(), None);
    let ack = |next_part| FlowReportFrame::Ack {
        term: TERM,
        report: BOOT + 1,
        next_part,
    };
    node.handle_frame(ms(2), HOLDER, ack(1));
    read_own(&mut node, &claims);
    assert_eq!(node.poll_output(), Some(part(1, &claims[2..], true)));
    // A repeated request has the part sent again, with the claims of that time.
    node.handle_frame(ms(3), HOLDER, FlowReportFrame::Request { term: TERM });
    read_own(&mut node, &[]);
    assert_eq!(node.poll_output(), Some(part(1, &[], true)));
    node.handle_frame(ms(4), HOLDER, ack(2));
    assert_eq!(outputs(&mut node), []);
}

#[test]
fn report_without_acknowledged_part_begins_again_with_new_flows() {
    let mut node = machine(DONOR);
    node.handle_view(ms(0), view(TERM));
    node.handle_frame(ms(0), HOLDER, FlowReportFrame::Request { term: TERM });
    report_own(&mut node, &[]);
    outputs(&mut node);
    // The holder has restarted, and a flow has begun.
    node.handle_frame(ms(1), HOLDER, FlowReportFrame::Request { term: TERM });
    assert!(matches!(
        outputs(&mut node)[..],
        [Output::Execute(Command::ListFlows { .. })]
    ));
}

#[test]
fn report_begins_again_when_holder_has_forgotten_parts() {
    let mut node = machine(DONOR);
    node.handle_view(ms(0), view(TERM));
    node.handle_frame(ms(0), HOLDER, FlowReportFrame::Request { term: TERM });
    let owned = OwnershipRecord::owned(DONOR, 3);
    let claims = [1, 2, 3].map(|port| (flow(port), owned));
    report_own(&mut node, &claims);
    let ack = |next_part| FlowReportFrame::Ack {
        term: TERM,
        report: BOOT + 1,
        next_part,
    };
    outputs(&mut node);
    node.handle_frame(ms(1), HOLDER, ack(1));
    read_own(&mut node, &claims);
    outputs(&mut node);
    // The answer to an earlier transmission changes nothing.
    node.handle_frame(ms(2), HOLDER, ack(1));
    assert_eq!(outputs(&mut node), []);
    node.handle_frame(ms(3), HOLDER, ack(0));
    assert!(matches!(
        outputs(&mut node)[..],
        [Output::Execute(Command::ListFlows { .. })]
    ));
}

#[test]
fn request_before_the_view_is_answered_with_the_view() {
    let mut node = machine(DONOR);
    node.handle_frame(ms(0), HOLDER, FlowReportFrame::Request { term: TERM });
    assert_eq!(outputs(&mut node), []);
    node.handle_view(ms(1), view(TERM));
    assert!(matches!(
        outputs(&mut node)[..],
        [Output::Execute(Command::ListFlows { .. })]
    ));
}

#[test]
fn request_of_former_holder_is_ignored() {
    let mut node = machine(DONOR);
    node.handle_view(ms(0), view(TERM));
    let term = TERM - 1;
    node.handle_frame(ms(1), FORMER, FlowReportFrame::Request { term });
    assert!(matches!(
        outputs(&mut node)[..],
        [Output::Event(Event::Ignored(_))]
    ));
}

#[test]
fn gap_between_views_begins_a_new_term() {
    let mut holder = holder();
    holder.handle_frame(ms(1), DONOR, report(Vec::new()));
    holder.handle_frame(ms(1), ACCEPTOR, report(Vec::new()));
    outputs(&mut holder);
    holder.handle_view(ms(2), view(TERM + 1));
    assert!(holder.is_ready() && outputs(&mut holder).is_empty());
    holder.handle_view(ms(3), view(TERM + 3));
    assert!(!holder.is_ready());
    assert!(outputs(&mut holder).contains(&Output::Execute(Command::ClearTable)));
}

#[test]
fn adopted_table_is_complete() {
    let config = TableRebuildConfig::new(HOLDER, BOOT);
    let mut holder = TableRebuild::new(ms(0), config, view(TERM), true);
    assert!(holder.is_ready() && holder.is_complete());
    assert_eq!(outputs(&mut holder), []);
    let rollback = change(ChangeKind::Rollback, 5);
    assert_eq!(holder.admit(DONOR, &rollback), Admission::Admitted);
}

#[test]
fn removed_holder_collects_no_reports() {
    let mut holder = holder();
    assert!(holder.poll_timeout().is_some());
    holder.handle_removal();
    while holder.poll_output().is_some() {}
    assert_eq!(holder.poll_timeout(), None);
    assert!(!holder.is_complete());
    // The node's records belong to an earlier view.
    holder.handle_view(ms(1), view(TERM + 1));
    assert_eq!(
        holder.poll_output(),
        Some(Output::Execute(Command::ClearTable))
    );
}

/// A claim of the donor, and the same flow claimed by the acceptor, although nothing is in transit.
fn disputed_flow(holder: &mut TableRebuild) -> [OwnershipRecord; 2] {
    let claims = [DONOR, ACCEPTOR].map(|node| OwnershipRecord::owned(node, u32::from(node.0)));
    let [recorded, claimed] = claims;
    holder.handle_frame(ms(1), DONOR, report(vec![(flow(1), recorded)]));
    holder.handle_frame(ms(2), ACCEPTOR, report(vec![(flow(1), claimed)]));
    let flow = flow(1);
    let dispute = Dispute {
        flow,
        recorded,
        claimed,
    };
    let records = holder.handle_disputes(vec![dispute]);
    assert_eq!(records, [(flow, Some(disputed_record(HOLDER)))]);
    assert!(holder.has_disputes());
    assert_eq!(holder.disputed_claims(), claims.map(|claim| (flow, claim)));
    assert_eq!(holder.disputed_flow_count(), 1);
    assert_eq!(holder.first_dispute(), Some((flow, claims.to_vec())));
    outputs(holder);
    claims
}

fn decided(record: Option<OwnershipRecord>) -> Output {
    let records = vec![(flow(1), record)];
    Output::Execute(Command::SetRecords { records })
}

#[test]
fn claims_after_the_complete_report_are_ignored() {
    let mut holder = holder();
    holder.handle_frame(ms(1), DONOR, report(Vec::new()));
    outputs(&mut holder);
    let late = (flow(1), OwnershipRecord::owned(DONOR, 9));
    holder.handle_frame(ms(2), DONOR, report(vec![late]));
    let ack = FlowReportFrame::Ack {
        term: TERM,
        report: 5,
        next_part: 1,
    };
    let answer = Output::Send {
        to: DONOR,
        frame: Frame::FlowReport(ack),
    };
    assert_eq!(outputs(&mut holder), [answer]);
}

#[test]
fn disputed_flow_is_decided_when_one_node_removes_it() {
    let mut holder = holder();
    let [_, claimed] = disputed_flow(&mut holder);
    let by_stranger = holder.admit(HOLDER, &change(ChangeKind::Remove, 9));
    assert_eq!(by_stranger, Admission::Admitted);
    let still = decided(Some(disputed_record(HOLDER)));
    assert_eq!(outputs(&mut holder), [still]);
    assert_eq!(
        holder.admit(DONOR, &change(ChangeKind::Remove, 3)),
        Admission::Admitted
    );
    assert_eq!(outputs(&mut holder), [decided(Some(claimed))]);
    assert!(!holder.has_disputes());
}

#[test]
fn disputed_flow_is_decided_when_one_node_leaves() {
    let mut holder = holder();
    let [recorded, _] = disputed_flow(&mut holder);
    let without_acceptor = View {
        server_nodes: BTreeSet::new(),
        ..view(TERM + 1)
    };
    holder.handle_view(ms(3), without_acceptor);
    assert!(outputs(&mut holder).contains(&decided(Some(recorded))));
    assert!(!holder.has_disputes());
}

#[test]
fn flow_follows_the_words_of_the_nodes_that_gave_it_on() {
    let mut holder = holder();
    let (donor, acceptor) = (transit(), OwnershipRecord::owned(HOLDER, 8));
    holder.handle_frame(ms(1), DONOR, report(vec![donor]));
    holder.handle_frame(ms(1), ACCEPTOR, report(vec![(flow(1), acceptor)]));
    outputs(&mut holder);
    let dispute = Dispute {
        flow: flow(1),
        recorded: donor.1,
        claimed: acceptor,
    };
    let records = holder.handle_disputes(vec![dispute]);
    assert_eq!(records, [(flow(1), Some(acceptor))]);
    assert!(!holder.has_disputes());
}

#[test]
fn decision_about_a_disputed_flow_waits_for_the_report_that_may_end_the_dispute() {
    let first = OwnershipRecord::transit(HOLDER, ACCEPTOR, 2);
    let mut holder = holder_with(&[(flow(1), first)]);
    let second = OwnershipRecord::transit(DONOR, FORMER, 5);
    holder.handle_frame(ms(1), DONOR, report(vec![(flow(1), second)]));
    let records = holder.handle_disputes(vec![Dispute {
        flow: flow(1),
        recorded: first,
        claimed: second,
    }]);
    assert_eq!(records, [(flow(1), Some(disputed_record(HOLDER)))]);
    // A refused rollback would make the donor give up a frozen flow that is its own.
    let rollback = change(ChangeKind::Rollback, 5);
    assert_eq!(holder.admit(DONOR, &rollback), Admission::Deferred);
    let given = (flow(1), OwnershipRecord::owned(DONOR, 4));
    holder.handle_frame(ms(2), ACCEPTOR, report(vec![given]));
    assert!(outputs(&mut holder).contains(&decided(Some(second))));
    assert_eq!(holder.admit(DONOR, &rollback), Admission::Admitted);
}

#[test]
fn flow_that_comes_back_to_its_former_acceptor_is_not_disputed_after_all_reports() {
    let first = OwnershipRecord::transit(HOLDER, ACCEPTOR, 2);
    let mut holder = holder_with(&[(flow(1), first)]);
    let second = transit();
    holder.handle_frame(ms(1), DONOR, report(vec![second]));
    let records = holder.handle_disputes(vec![Dispute {
        flow: flow(1),
        recorded: first,
        claimed: second.1,
    }]);
    assert_eq!(records, [(flow(1), Some(disputed_record(HOLDER)))]);
    // The acceptor waits for the donor's state, and has forgotten that it had the flow between the two transits.
    holder.handle_frame(ms(2), ACCEPTOR, report(vec![second]));
    assert!(outputs(&mut holder).contains(&decided(Some(second.1))));
    assert!(!holder.has_disputes());
}

#[test]
fn flow_that_an_acceptor_gave_back_is_not_disputed_by_late_report_of_an_earlier_donor() {
    let transit = (flow(1), OwnershipRecord::transit(DONOR, HOLDER, 5));
    let mut holder = holder_with(&[transit]);
    holder.handle_frame(ms(1), DONOR, report(vec![transit]));
    let rollback = change(ChangeKind::Rollback, 5);
    assert_eq!(holder.admit(HOLDER, &rollback), Admission::Admitted);
    outputs(&mut holder);
    // The donor got the flow from the holder, which got it from the node that reports now.
    let first = OwnershipRecord::transit(ACCEPTOR, HOLDER, 2);
    holder.handle_frame(ms(2), ACCEPTOR, report(vec![(flow(1), first)]));
    let recorded = OwnershipRecord::owned(DONOR, 6);
    let records = holder.handle_disputes(vec![Dispute {
        flow: flow(1),
        recorded,
        claimed: first,
    }]);
    assert_eq!(records, [(flow(1), Some(recorded))]);
    assert!(!holder.has_disputes());
}

#[test]
fn holder_believes_no_ownership_that_it_has_handed_over_since() {
    let recorded = OwnershipRecord::owned(HOLDER, 1);
    let mut holder = holder_with(&[(flow(1), recorded)]);
    holder.handle_frame(ms(1), ACCEPTOR, report(Vec::new()));
    let claimed = OwnershipRecord::owned(DONOR, 1_000);
    let dispute = |recorded| Dispute {
        flow: flow(1),
        recorded,
        claimed,
    };
    let records = holder.handle_disputes(vec![dispute(recorded)]);
    assert_eq!(records, [(flow(1), Some(recorded))]);
    let divert = ChangeKind::Divert { acceptor: ACCEPTOR };
    for (asker, kind, epoch) in [(HOLDER, divert, 1), (ACCEPTOR, ChangeKind::Commit, 2)] {
        assert_eq!(
            holder.admit(asker, &change(kind, epoch)),
            Admission::Admitted
        );
    }
    // Otherwise the holder, in doubt about its handoff, would take the flow back.
    let records = holder.handle_disputes(vec![dispute(OwnershipRecord::owned(ACCEPTOR, 3))]);
    assert_eq!(records, [(flow(1), Some(disputed_record(HOLDER)))]);
}

/// The acceptor reports that the flow is its own, and then hands the flow over to the holder; the donor has not reported.
/// Returns the holder's record of the flow.
fn hand_over_to_holder(holder: &mut TableRebuild) -> OwnershipRecord {
    let owned = vec![(flow(1), OwnershipRecord::owned(ACCEPTOR, 6))];
    holder.handle_frame(ms(1), ACCEPTOR, report(owned));
    let divert = ChangeKind::Divert { acceptor: HOLDER };
    for (asker, kind, epoch) in [(ACCEPTOR, divert, 6), (HOLDER, ChangeKind::Commit, 7)] {
        assert_eq!(
            holder.admit(asker, &change(kind, epoch)),
            Admission::Admitted
        );
    }
    outputs(holder);
    OwnershipRecord::owned(HOLDER, 8)
}

#[test]
fn flow_handed_over_and_removed_does_not_come_back_by_late_report_of_its_donor() {
    let mut holder = holder();
    let record = hand_over_to_holder(&mut holder);
    let remove = change(ChangeKind::Remove, record.epoch);
    assert_eq!(holder.admit(HOLDER, &remove), Admission::Admitted);
    outputs(&mut holder);
    holder.handle_frame(ms(2), DONOR, report(vec![transit()]));
    assert!(!outputs(&mut holder).iter().any(is_command));
}

#[test]
fn flow_handed_over_is_not_disputed_by_late_report_of_its_donor() {
    let mut holder = holder();
    let record = hand_over_to_holder(&mut holder);
    holder.handle_frame(ms(2), DONOR, report(vec![transit()]));
    let records = holder.handle_disputes(vec![Dispute {
        flow: flow(1),
        recorded: record,
        claimed: transit().1,
    }]);
    assert_eq!(records, [(flow(1), Some(record))]);
    assert!(!holder.has_disputes());
}

#[test]
fn removal_by_a_node_without_the_flow_hides_no_claim() {
    let mut holder = holder();
    holder.handle_frame(ms(1), ACCEPTOR, report(Vec::new()));
    let remove = change(ChangeKind::Remove, u32::MAX);
    assert_eq!(holder.admit(ACCEPTOR, &remove), Admission::Admitted);
    outputs(&mut holder);
    let records = vec![(flow(1), OwnershipRecord::owned(DONOR, 3))];
    holder.handle_frame(ms(2), DONOR, report(records.clone()));
    assert!(outputs(&mut holder).contains(&Output::Execute(Command::StoreNewer { records })));
}

#[test]
fn claim_with_an_epoch_near_the_end_is_ignored() {
    let mut holder = holder();
    let records = vec![(flow(1), OwnershipRecord::owned(DONOR, u32::MAX))];
    holder.handle_frame(ms(1), DONOR, report(records));
    assert!(!outputs(&mut holder).iter().any(is_command));
}

#[test]
fn statements_of_one_node_are_bounded_and_leave_room_for_those_of_others() {
    let mut statements = Statements::default();
    let record = OwnershipRecord::transit(DONOR, ACCEPTOR, 5);
    let flows = |host: u8| (0..u16::MAX).map(move |port| flow_of_host(host, port));
    let all = (0..5).flat_map(flows);
    let added = all
        .filter(|flow| statements.add(*flow, DONOR, record))
        .count();
    assert_eq!(added, 1 << 18);
    assert!(statements.add(flow_of_host(9, 1), ACCEPTOR, record));
    assert!(statements.add(flow_of_host(0, 1), DONOR, record), "known");
}

fn flow_of_host(host: u8, port: u16) -> Flow {
    Flow {
        remote: ([10, 0, 2, host], port).into(),
        ..flow(1)
    }
}
