//! Tests of the replication machine.

use super::legs::Leg;
use super::*;
use core::iter::from_fn;
use holdfast_wire::Protocol;
use holdfast_wire::health_frames::ServiceEndpoint;
use holdfast_wire::replication_frames::{ConnectionRecord, LegTranslation};

mod backup;

const CONTACT: NodeId = NodeId(9);
const BACKUP: NodeId = NodeId(8);
/// Nodes of the legs.
const NODES: [NodeId; 4] = [NodeId(1), NodeId(2), NodeId(3), NodeId(4)];

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn leg(position: usize) -> LegIndex {
    LegIndex::new(position).expect("below the limit")
}

fn legs(positions: &[usize]) -> LegSet {
    positions.iter().map(|position| leg(*position)).collect()
}

fn client(number: u16) -> SocketAddr {
    SocketAddr::from(([10, 0, 1, 2], number))
}

fn config() -> ReplicatedServiceConfig {
    let service = ServiceEndpoint {
        protocol: Protocol::Tcp,
        address: SocketAddr::from(([10, 0, 0, 1], 80)),
    };
    ReplicatedServiceConfig {
        replicas: 2,
        ..ReplicatedServiceConfig::new(CONTACT, service)
    }
}

fn view(backups: &[NodeId]) -> View {
    View {
        backups: backups.to_vec(),
        ..View::configured(CONTACT, NODES)
    }
}

fn record(client: SocketAddr, live: LegSet) -> ConnectionRecord {
    let translation = LegTranslation {
        sequence_offset: 5,
        timestamp_offset: 0,
        mss: 1460,
        window_scale: 7,
    };
    ConnectionRecord {
        client,
        client_isn: 1,
        service_isn: 2,
        mss: 1460,
        client_window_scale: 7,
        service_window_scale: 7,
        has_timestamps: true,
        live,
        legs: [Some(translation); LEGS_MAX],
    }
}

/// Returns a machine with a primary and two replicas, whose first outputs are taken.
fn machine_with(config: ReplicatedServiceConfig) -> Replication {
    let mut machine = Replication::new(ms(0), config, &NODES[..3], &view(&[])).expect("three legs");
    outputs(&mut machine);
    machine
}

fn machine() -> Replication {
    machine_with(config())
}

fn outputs(machine: &mut Replication) -> Vec<Output> {
    from_fn(|| machine.poll_output()).collect()
}

fn events(outputs: &[Output]) -> Vec<Event> {
    let event = |output: &Output| match output {
        Output::Event(event) => Some(*event),
        _ => None,
    };
    outputs.iter().filter_map(event).collect()
}

/// Returns the reason for which each leg was dropped.
fn drops(outputs: &[Output]) -> Vec<(LegIndex, DropReason)> {
    let drop = |event: Event| match event {
        Event::Dropped { leg, reason, .. } => Some((leg, reason)),
        _ => None,
    };
    events(outputs).into_iter().filter_map(drop).collect()
}

/// Returns the last roles of the service.
fn last_roles(outputs: &[Output]) -> Option<(LegIndex, LegSet)> {
    let roles = |output: &Output| match output {
        Output::SetRoles(roles) => Some((roles.primary, roles.live)),
        _ => None,
    };
    outputs.iter().filter_map(roles).next_back()
}

fn window_updates(outputs: &[Output]) -> Vec<SocketAddr> {
    let update = |output: &Output| match output {
        Output::SendWindowUpdate { client } => Some(*client),
        _ => None,
    };
    outputs.iter().filter_map(update).collect()
}

fn resets(outputs: &[Output]) -> Vec<SocketAddr> {
    let reset = |output: &Output| match output {
        Output::ResetClient { client } => Some(*client),
        _ => None,
    };
    outputs.iter().filter_map(reset).collect()
}

fn feed(machine: &mut Replication, now: Duration, event: DataPlaneEvent) -> Vec<Output> {
    machine.handle_data_plane(now, event);
    outputs(machine)
}

/// Opens connections with these numbers in all legs.
fn open(machine: &mut Replication, numbers: &[u16]) {
    for number in numbers {
        let record = record(client(*number), machine.roles().live);
        let shown = feed(machine, ms(0), DataPlaneEvent::Opened { record });
        let client = client(*number);
        assert_eq!(shown, [Output::ShowSynAck { client }]);
    }
}

fn progress(number: u16, acknowledged: u32, behind: [u32; LEGS_MAX]) -> DataPlaneEvent {
    DataPlaneEvent::Progress {
        client: client(number),
        acknowledged,
        behind,
        compared: legs(&[0, 1, 2, 3]),
    }
}

fn reset(number: u16, position: usize, acknowledged: u32) -> DataPlaneEvent {
    DataPlaneEvent::LegReset {
        client: client(number),
        leg: leg(position),
        acknowledged,
    }
}

fn silent(number: u16, position: usize, silence: Duration, answered: &[usize]) -> DataPlaneEvent {
    DataPlaneEvent::LegSilent {
        client: client(number),
        leg: leg(position),
        silence,
        round_trip: ms(2),
        answered: legs(answered),
    }
}

/// Passes on a sign of life of each node.
fn hear_all(machine: &mut Replication, now: Duration) {
    for node in NODES {
        machine.handle_heard(now, node);
    }
}

/// Advances to the time `end`; the nodes at these positions answer each probe at once.
fn run_until(machine: &mut Replication, end: Duration, answering: &[usize]) -> Vec<Output> {
    let mut all = Vec::new();
    while let Some(at) = machine.poll_timeout().filter(|at| *at <= end) {
        machine.handle_timeout(at);
        let new = outputs(machine);
        for position in answering {
            let node = NODES[*position];
            if new.contains(&Output::Probe { node }) {
                machine.handle_heard(at, node);
            }
        }
        all.extend(new);
    }
    all
}

#[test]
fn first_roles_name_all_legs_and_the_first_as_primary() {
    let mut machine =
        Replication::new(ms(0), config(), &NODES[..3], &view(&[])).expect("three legs");
    let first = outputs(&mut machine);
    assert_eq!(last_roles(&first), Some((leg(0), legs(&[0, 1, 2]))));
    assert_eq!(
        events(&first),
        [Event::Protection(Protection::Full)],
        "{first:?}"
    );
}

#[test]
fn impossible_lists_of_nodes_are_refused() {
    let new = |nodes: &[NodeId]| Replication::new(ms(0), config(), nodes, &view(&[])).err();
    assert_eq!(new(&[]), Some(CommandError::NoLegs));
    assert_eq!(new(&[NODES[0]; 5]), Some(CommandError::Full));
    assert_eq!(
        new(&[NODES[0], NODES[1], NODES[0]]),
        Some(CommandError::NodeHasLeg(NODES[0]))
    );
}

#[test]
fn ended_server_of_the_primary_costs_one_change_of_roles_and_one_poke_of_all_connections() {
    let mut machine = machine();
    open(&mut machine, &[1, 2]);
    let ended = ServerState::Failing(ServerProblem::ListenerClosed);
    machine.handle_server(ms(5), NODES[0], &ended);
    let all = outputs(&mut machine);
    assert_eq!(drops(&all), [(leg(0), DropReason::ServerEnded)]);
    assert_eq!(last_roles(&all), Some((leg(1), legs(&[1, 2]))));
    assert!(all.contains(&Output::SendAllWindowUpdates) && window_updates(&all).is_empty());
    let promoted = Event::Promoted {
        leg: leg(1),
        former: leg(0),
        in_doubt: false,
    };
    assert!(events(&all).contains(&promoted), "{all:?}");
    assert!(
        events(&all).contains(&Event::Protection(Protection::Reduced { sound: 1 })),
        "{all:?}"
    );
}

#[test]
fn promotion_takes_the_leg_that_lacks_the_fewest_bytes() {
    let mut machine = machine();
    open(&mut machine, &[1, 2]);
    feed(&mut machine, ms(1), progress(1, 0, [0, 10, 90, 0]));
    feed(&mut machine, ms(1), progress(2, 0, [0, 100, 10, 0]));
    machine.handle_server(ms(5), NODES[0], &ServerState::Absent);
    let all = outputs(&mut machine);
    assert_eq!(last_roles(&all), Some((leg(2), legs(&[1, 2]))));
}

#[test]
fn leg_in_doubt_is_not_promoted_while_a_sound_one_lives() {
    let mut machine = machine();
    open(&mut machine, &[1]);
    let diverged = DataPlaneEvent::Diverged {
        client: client(1),
        position: 77,
        digests: [Some(1), Some(2), Some(1), None],
    };
    let reported = feed(&mut machine, ms(1), diverged);
    let event = Event::Diverged {
        client: client(1),
        leg: leg(1),
        position: 77,
    };
    assert!(events(&reported).contains(&event));
    assert!(drops(&reported).is_empty());
    assert!(feed(&mut machine, ms(2), diverged).is_empty());
    feed(&mut machine, ms(2), progress(1, 0, [0, 0, 500, 0]));
    assert_eq!(
        machine.promote(ms(3), leg(1)),
        Err(CommandError::InDoubt(leg(1)))
    );
    machine.handle_server(ms(5), NODES[0], &ServerState::Absent);
    let all = outputs(&mut machine);
    assert_eq!(last_roles(&all), Some((leg(2), legs(&[1, 2]))));
    machine.handle_server(ms(6), NODES[2], &ServerState::Absent);
    let in_doubt = Event::Promoted {
        leg: leg(1),
        former: leg(2),
        in_doubt: true,
    };
    assert!(events(&outputs(&mut machine)).contains(&in_doubt));
}

#[test]
fn reset_of_a_leg_is_hidden_while_another_goes_on_and_the_last_one_reaches_the_client() {
    let mut machine = machine();
    open(&mut machine, &[1, 2]);
    let all = feed(&mut machine, ms(1), reset(1, 0, 10));
    let own_roles = Output::SetConnectionRoles {
        client: client(1),
        primary: leg(1),
        live: legs(&[1, 2]),
        follows_service_roles: false,
    };
    assert!(all.contains(&own_roles), "{all:?}");
    assert!(all.contains(&Output::CheckServer { node: NODES[0] }));
    assert_eq!(window_updates(&all), [client(1)]);
    assert_eq!(last_roles(&all), None);
    let all = feed(&mut machine, ms(2), reset(1, 1, 10));
    assert!(resets(&all).is_empty());
    let all = feed(&mut machine, ms(3), reset(1, 2, 10));
    assert_eq!(resets(&all), [client(1)]);
    assert_eq!(machine.connection_count(), 1);
}

#[test]
fn leg_that_missed_input_leaves_the_service() {
    let mut machine = machine();
    open(&mut machine, &[1, 2]);
    feed(&mut machine, ms(1), reset(1, 0, 10));
    let all = feed(&mut machine, ms(2), progress(1, 10, [0; 4]));
    assert!(drops(&all).is_empty(), "{all:?}");
    let all = feed(&mut machine, ms(3), progress(1, 11, [0; 4]));
    assert_eq!(drops(&all), [(leg(0), DropReason::MissedInput)]);
    assert!(all.contains(&Output::SendAllWindowUpdates));
    let same = Output::SetConnectionRoles {
        client: client(1),
        primary: leg(1),
        live: legs(&[1, 2]),
        follows_service_roles: true,
    };
    assert!(all.contains(&same), "{all:?}");
}

#[test]
fn wrapped_positions_are_compared() {
    let mut machine = machine();
    open(&mut machine, &[1]);
    feed(&mut machine, ms(1), reset(1, 1, u32::MAX));
    let all = feed(&mut machine, ms(2), progress(1, u32::MAX - 1, [0; 4]));
    assert!(drops(&all).is_empty(), "{all:?}");
    let all = feed(&mut machine, ms(2), progress(1, 3, [0; 4]));
    assert_eq!(drops(&all), [(leg(1), DropReason::MissedInput)]);
}

#[test]
fn refused_handshake_drops_the_leg_only_if_another_answers() {
    let mut machine = machine();
    let refused = |refused: &[usize], answered: &[usize]| DataPlaneEvent::HandshakeRefused {
        client: client(1),
        refused: legs(refused),
        answered: legs(answered),
    };
    assert!(feed(&mut machine, ms(1), refused(&[0], &[])).is_empty());
    let all = feed(&mut machine, ms(1), refused(&[0, 1, 2], &[]));
    assert_eq!(resets(&all), [client(1)]);
    let all = feed(&mut machine, ms(2), refused(&[0], &[2]));
    assert_eq!(drops(&all), [(leg(0), DropReason::Refused)]);
    assert_eq!(last_roles(&all), Some((leg(1), legs(&[1, 2]))));
    assert_eq!(window_updates(&all), [client(1)]);
}

#[test]
fn unanswered_handshake_drops_the_leg_at_the_third_attempt() {
    let mut machine = machine();
    let unanswered = |attempts| DataPlaneEvent::HandshakeUnanswered {
        client: client(1),
        silent: legs(&[1]),
        answered: legs(&[0, 2]),
        attempts,
    };
    let all = feed(&mut machine, ms(1), unanswered(1));
    assert!(drops(&all).is_empty());
    machine.handle_heard(ms(2), NODES[1]);
    let all = feed(&mut machine, ms(1_100), unanswered(2));
    assert!(drops(&all).is_empty());
    let all = feed(&mut machine, ms(3_100), unanswered(3));
    assert_eq!(drops(&all), [(leg(1), DropReason::NoAnswer)]);
}

#[test]
fn silent_leg_is_dropped_at_three_round_trips_and_60_ms_unless_its_node_answers() {
    for answers in [false, true] {
        let mut machine = machine();
        open(&mut machine, &[1]);
        hear_all(&mut machine, ms(1_000));
        let all = feed(&mut machine, ms(1_033), silent(1, 0, ms(33), &[1, 2]));
        assert!(all.contains(&Output::Probe { node: NODES[0] }));
        let answering: &[usize] = if answers { &[0, 1, 2] } else { &[1, 2] };
        if answers {
            machine.handle_heard(ms(1_034), NODES[0]);
        }
        let all = run_until(&mut machine, ms(1_065), answering);
        assert!(drops(&all).is_empty(), "{all:?}");
        let all = run_until(&mut machine, ms(1_066), answering);
        let expected = match answers {
            true => vec![],
            false => vec![(leg(0), DropReason::Silent)],
        };
        assert_eq!(drops(&all), expected);
    }
}

#[test]
fn silence_of_all_legs_drops_none_before_the_patience_is_over() {
    let mut machine = machine();
    open(&mut machine, &[1]);
    let all = run_until(&mut machine, ms(4_990), &[]);
    assert!(drops(&all).is_empty(), "{all:?}");
    let all = run_until(&mut machine, ms(5_100), &[]);
    assert_eq!(drops(&all).len(), 3, "{all:?}");
    assert_eq!(resets(&all), [client(1)]);
    assert_eq!(last_roles(&all).map(|(_, live)| live), Some(LegSet::EMPTY));
    assert!(events(&all).contains(&Event::Protection(Protection::Dead)));
}

#[test]
fn idle_leg_is_suspected_without_heartbeats() {
    let mut machine = machine();
    open(&mut machine, &[1]);
    let all = run_until(&mut machine, ms(199), &[1, 2]);
    assert_eq!(all, []);
    let all = run_until(&mut machine, ms(290), &[1, 2]);
    assert_eq!(drops(&all), [(leg(0), DropReason::Silent)]);
}

#[test]
fn connection_without_an_answer_for_a_second_drops_the_leg_whose_node_answers() {
    let mut machine = machine();
    open(&mut machine, &[1]);
    machine.handle_heard(ms(999), NODES[1]);
    let all = feed(&mut machine, ms(1_000), silent(1, 1, ms(999), &[0, 2]));
    assert!(drops(&all).is_empty());
    let all = feed(&mut machine, ms(1_001), silent(1, 1, ms(1_000), &[]));
    assert!(drops(&all).is_empty(), "nobody answered");
    let all = feed(&mut machine, ms(1_001), silent(1, 1, ms(1_000), &[0]));
    assert_eq!(drops(&all), [(leg(1), DropReason::Unresponsive)]);
}

#[test]
fn stalled_primary_is_replaced_unless_only_wrong_legs_are_ahead() {
    let mut machine = machine();
    open(&mut machine, &[1]);
    let stalled = |ahead: &[usize]| DataPlaneEvent::LegStalled {
        client: client(1),
        leg: leg(0),
        ahead: legs(ahead),
    };
    let diverged = DataPlaneEvent::Diverged {
        client: client(1),
        position: 7,
        digests: [Some(1), Some(2), None, None],
    };
    feed(&mut machine, ms(1), diverged);
    let all = feed(&mut machine, ms(2), stalled(&[1]));
    assert!(drops(&all).is_empty(), "{all:?}");
    let all = feed(&mut machine, ms(3), stalled(&[1, 2]));
    assert_eq!(drops(&all), [(leg(0), DropReason::Stalled)]);
    assert_eq!(last_roles(&all), Some((leg(2), legs(&[1, 2]))));
}

#[test]
fn lagging_leg_is_dropped_or_reported_once_by_policy() {
    let lagging = DataPlaneEvent::LegLagging {
        client: client(1),
        leg: leg(2),
        bytes: 1 << 20,
    };
    let mut machine = machine();
    open(&mut machine, &[1]);
    let all = feed(&mut machine, ms(1), lagging);
    assert_eq!(drops(&all), [(leg(2), DropReason::Lagging)]);
    let mut patient = machine_with(ReplicatedServiceConfig {
        lagging: LagPolicy::Wait,
        ..config()
    });
    open(&mut patient, &[1]);
    let all = feed(&mut patient, ms(1), lagging);
    assert_eq!(events(&all).len(), 1);
    assert!(feed(&mut patient, ms(2), lagging).is_empty());
}

#[test]
fn majority_outvotes_the_primary() {
    let vote = ReplicatedServiceConfig {
        divergence: DivergencePolicy::Vote,
        ..config()
    };
    let diverged = |digests| DataPlaneEvent::Diverged {
        client: client(1),
        position: 7,
        digests,
    };
    let mut machine = machine_with(vote.clone());
    open(&mut machine, &[1]);
    let all = feed(
        &mut machine,
        ms(1),
        diverged([Some(1), Some(2), None, None]),
    );
    let disputed = Event::Diverged {
        client: client(1),
        leg: leg(1),
        position: 7,
    };
    assert_eq!(events(&all), [disputed], "a vote is missing");
    assert_eq!(
        machine.promote(ms(1), leg(1)),
        Err(CommandError::InDoubt(leg(1)))
    );
    let all = feed(
        &mut machine,
        ms(1),
        diverged([Some(1), Some(2), Some(2), None]),
    );
    assert_eq!(drops(&all), [(leg(0), DropReason::Diverged)]);
    assert_eq!(last_roles(&all), Some((leg(1), legs(&[1, 2]))));
    // Two legs have no majority: the client has seen the primary's word.
    let all = feed(
        &mut machine,
        ms(2),
        diverged([None, Some(5), Some(6), None]),
    );
    assert_eq!(drops(&all), [(leg(2), DropReason::Diverged)]);

    let mut undecided = machine_with(vote);
    open(&mut undecided, &[1]);
    let all = feed(
        &mut undecided,
        ms(1),
        diverged([Some(1), Some(2), Some(3), None]),
    );
    assert!(drops(&all).is_empty(), "{all:?}");
    assert_eq!(events(&all).len(), 3, "both are reported: {all:?}");
}

#[test]
fn differing_leg_is_dropped_by_policy() {
    let mut machine = machine_with(ReplicatedServiceConfig {
        divergence: DivergencePolicy::Drop,
        ..config()
    });
    open(&mut machine, &[1]);
    let all = feed(
        &mut machine,
        ms(1),
        DataPlaneEvent::Diverged {
            client: client(1),
            position: 7,
            digests: [Some(1), Some(2), None, None],
        },
    );
    assert_eq!(drops(&all), [(leg(1), DropReason::Diverged)]);
}

fn finished(position: usize) -> DataPlaneEvent {
    DataPlaneEvent::LegFinished {
        client: client(1),
        leg: leg(position),
        acknowledged: 10,
    }
}

#[test]
fn agreed_end_of_a_connection_drops_nobody() {
    let mut machine = machine();
    open(&mut machine, &[1]);
    let all = feed(&mut machine, ms(1), finished(0));
    assert_eq!(all, [Output::CheckServer { node: NODES[0] }]);
    feed(&mut machine, ms(20), finished(1));
    feed(&mut machine, ms(50), finished(2));
    assert_eq!(run_until(&mut machine, ms(190), &[0, 1, 2]), []);
    let closed = DataPlaneEvent::Closed { client: client(1) };
    assert!(feed(&mut machine, ms(191), closed).is_empty());
    assert_eq!(machine.connection_count(), 0);
}

#[test]
fn majority_decides_about_an_end_that_others_do_not_follow() {
    for (ends, leaving) in [(&[0][..], [0]), (&[0, 1][..], [2]), (&[2][..], [2])] {
        let mut machine = machine();
        open(&mut machine, &[1]);
        for position in ends {
            feed(&mut machine, ms(1), finished(*position));
        }
        let all = run_until(&mut machine, ms(81), &[0, 1, 2]);
        let left: LegSet = events(&all)
            .iter()
            .filter_map(|event| match event {
                Event::LeftConnection { leg, .. } => Some(*leg),
                _ => None,
            })
            .collect();
        assert_eq!(left, legs(&leaving), "{ends:?}");
    }
}

#[test]
fn end_waits_for_legs_that_lack_output() {
    let mut machine = machine();
    open(&mut machine, &[1]);
    feed(&mut machine, ms(1), progress(1, 10, [0, 900, 900, 0]));
    feed(&mut machine, ms(1), finished(0));
    let all = run_until(&mut machine, ms(990), &[0, 1, 2]);
    assert_eq!(events(&all), [], "{all:?}");
    let output_after_fin = DataPlaneEvent::OutputAfterFin {
        client: client(1),
        finished: legs(&[0]),
    };
    let all = feed(&mut machine, ms(991), output_after_fin);
    let left = Event::LeftConnection {
        client: client(1),
        leg: leg(0),
    };
    assert_eq!(events(&all), [left]);
}

#[test]
fn end_does_not_wait_for_ever_for_legs_that_lack_output() {
    let mut machine = machine();
    open(&mut machine, &[1]);
    feed(&mut machine, ms(1), progress(1, 10, [0, 0, 900, 0]));
    feed(&mut machine, ms(1), finished(0));
    feed(&mut machine, ms(2), finished(1));
    let all = run_until(&mut machine, ms(1_100), &[0, 1, 2]);
    let left = Event::LeftConnection {
        client: client(1),
        leg: leg(2),
    };
    assert_eq!(events(&all), [left], "{all:?}");
}

#[test]
fn last_leg_stays_when_its_server_ends() {
    let mut machine = machine();
    open(&mut machine, &[1]);
    for node in &NODES[..3] {
        machine.handle_server(ms(1), *node, &ServerState::Absent);
    }
    let all = outputs(&mut machine);
    assert_eq!(drops(&all).len(), 2);
    assert_eq!(machine.roles().live, legs(&[2]));
    assert_eq!(machine.protection(), Protection::Alone);
}

#[test]
fn operator_promotes_a_sound_leg_and_stops_replication() {
    let mut machine = machine();
    open(&mut machine, &[1]);
    assert_eq!(
        machine.promote(ms(1), leg(0)),
        Err(CommandError::AlreadyPrimary(leg(0)))
    );
    assert_eq!(
        machine.promote(ms(1), leg(3)),
        Err(CommandError::NoSuchLeg(leg(3)))
    );
    assert_eq!(machine.promote(ms(1), leg(2)), Ok(()));
    let all = outputs(&mut machine);
    assert_eq!(last_roles(&all), Some((leg(2), legs(&[0, 1, 2]))));
    assert!(all.contains(&Output::SendAllWindowUpdates));
    assert_eq!(machine.stop(ms(2)), Ok(()));
    let all = outputs(&mut machine);
    assert_eq!(
        drops(&all),
        [(leg(0), DropReason::Stopped), (leg(1), DropReason::Stopped)]
    );
    assert_eq!(machine.roles().live, legs(&[2]));
}

#[test]
fn new_leg_counts_once_it_is_level_in_all_connections() {
    let mut machine = machine();
    open(&mut machine, &[1, 2]);
    let new = machine.add_leg(ms(1), NODES[3]).expect("a free position");
    assert_eq!(new, leg(3));
    assert_eq!(
        machine.add_leg(ms(1), NODES[3]),
        Err(CommandError::NodeHasLeg(NODES[3]))
    );
    assert_eq!(
        machine.promote(ms(1), new),
        Err(CommandError::CatchingUp(new))
    );
    let translation = record(client(1), legs(&[0])).legs[0].expect("a translation");
    for number in [1, 2] {
        let joined = DataPlaneEvent::LegJoined {
            client: client(number),
            leg: new,
            translation,
        };
        feed(&mut machine, ms(2), joined);
    }
    assert_eq!(machine.handle_leg_ready(ms(2), new), Ok(()));
    let all = outputs(&mut machine);
    assert_eq!(last_roles(&all), Some((leg(0), legs(&[0, 1, 2, 3]))));
    feed(&mut machine, ms(3), progress(1, 0, [0, 0, 0, 70_000]));
    feed(&mut machine, ms(3), progress(2, 0, [0, 0, 0, 10]));
    assert_eq!(
        machine.promote(ms(3), new),
        Err(CommandError::CatchingUp(new))
    );
    let all = feed(&mut machine, ms(4), progress(1, 0, [0, 0, 0, 60_000]));
    assert!(events(&all).contains(&Event::CaughtUp { leg: new }));
    assert_eq!(machine.promote(ms(5), new), Ok(()));
}

#[test]
fn new_leg_that_lacks_a_connection_is_dropped_at_its_next_input() {
    let mut machine = machine();
    open(&mut machine, &[1]);
    let new = machine.add_leg(ms(1), NODES[3]).expect("a free position");
    assert_eq!(machine.handle_leg_ready(ms(2), new), Ok(()));
    outputs(&mut machine);
    let all = feed(&mut machine, ms(3), progress(1, 1, [0; 4]));
    assert_eq!(drops(&all), [(new, DropReason::MissedInput)]);
}

#[test]
fn new_leg_that_is_the_last_one_counts_at_its_deadline() {
    let mut machine = machine();
    open(&mut machine, &[1]);
    let new = machine.add_leg(ms(1), NODES[3]).expect("a free position");
    let joined = DataPlaneEvent::LegJoined {
        client: client(1),
        leg: new,
        translation: record(client(1), legs(&[0])).legs[0].expect("a translation"),
    };
    feed(&mut machine, ms(2), joined);
    assert_eq!(machine.handle_leg_ready(ms(2), new), Ok(()));
    for node in &NODES[..3] {
        machine.handle_server(ms(3), *node, &ServerState::Absent);
    }
    assert_eq!(machine.roles().live, LegSet::of(new));
    let all = run_until(&mut machine, ms(31_000), &[3]);
    assert!(events(&all).contains(&Event::CaughtUp { leg: new }));
    assert_eq!(machine.roles().live, LegSet::of(new));
}

#[test]
fn new_leg_that_is_never_level_is_dropped() {
    let mut machine = machine();
    open(&mut machine, &[1]);
    let new = machine.add_leg(ms(1), NODES[3]).expect("a free position");
    let joined = DataPlaneEvent::LegJoined {
        client: client(1),
        leg: new,
        translation: record(client(1), legs(&[0])).legs[0].expect("a translation"),
    };
    feed(&mut machine, ms(2), joined);
    assert_eq!(machine.handle_leg_ready(ms(2), new), Ok(()));
    let all = run_until(&mut machine, ms(30_002), &[0, 1, 2, 3]);
    assert_eq!(drops(&all), [(new, DropReason::NeverCaughtUp)]);
    machine.add_leg(ms(31_000), NODES[3]).expect("free again");
    machine.handle_leg_failed(ms(31_001), new);
    let all = outputs(&mut machine);
    assert_eq!(drops(&all), [(new, DropReason::NeverCaughtUp)]);
}

#[test]
fn removed_node_loses_its_leg_and_another_contact_node_ends_the_machine() {
    let mut machine = machine();
    open(&mut machine, &[1]);
    let mut next = view(&[]);
    next.epoch = 2;
    next.server_nodes.remove(&NODES[0]);
    machine.handle_view(ms(1), &next);
    let all = outputs(&mut machine);
    assert_eq!(drops(&all), [(leg(0), DropReason::NodeRemoved)]);
    next.epoch = 3;
    next.contact_node = NODES[1];
    machine.handle_view(ms(2), &next);
    assert_eq!(machine.poll_timeout(), None);
    assert!(feed(&mut machine, ms(3), reset(1, 1, 0)).is_empty());
    assert_eq!(
        machine.promote(ms(3), leg(2)),
        Err(CommandError::NotContactNode)
    );
}

#[test]
fn connections_beyond_the_limit_are_refused_and_reported_once() {
    let mut machine = machine_with(ReplicatedServiceConfig {
        connections_max: 1,
        ..config()
    });
    open(&mut machine, &[1]);
    let opened = |number| DataPlaneEvent::Opened {
        record: record(client(number), legs(&[0, 1, 2])),
    };
    let all = feed(&mut machine, ms(1), opened(2));
    assert_eq!(resets(&all), [client(2)]);
    assert_eq!(events(&all), [Event::ConnectionsFull]);
    let all = feed(&mut machine, ms(1), opened(3));
    assert_eq!(events(&all), []);
    // A new connection of the same client replaces the former one.
    let all = feed(&mut machine, ms(1), opened(1));
    assert!(resets(&all).is_empty());
}

#[test]
fn leg_at_the_contact_node_is_never_suspected() {
    let mut machine = machine();
    let state: &mut Leg = machine.legs.get_mut(leg(1)).expect("a leg");
    state.node = CONTACT;
    let all = run_until(&mut machine, ms(1_000), &[0, 2]);
    assert!(drops(&all).is_empty(), "{all:?}");
}
