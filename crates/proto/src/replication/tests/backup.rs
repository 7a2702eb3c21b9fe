//! Tests of the backup's copy.

use super::*;

/// Returns a machine whose backup has the snapshot, and the backup's copy.
fn machine_and_copy() -> (Replication, BackupCopy) {
    let mut machine =
        Replication::new(ms(0), config(), &NODES[..3], &view(&[BACKUP])).expect("three legs");
    let mut copy = BackupCopy::new(config().service, 1_000);
    assert!(exchange(&mut machine, &mut copy, ms(0)).is_empty());
    assert!(copy.is_complete());
    (machine, copy)
}

/// Passes frames and answers on until there are none. Returns the clients whose handshakes were completed.
fn exchange(machine: &mut Replication, copy: &mut BackupCopy, now: Duration) -> Vec<SocketAddr> {
    let mut shown = Vec::new();
    loop {
        let all = outputs(machine);
        if all.is_empty() {
            return shown;
        }
        for output in all {
            match output {
                Output::Send { to, frame } => {
                    assert_eq!(to, BACKUP);
                    if let Some(answer) = copy.handle_frame(frame) {
                        machine.handle_frame(now, BACKUP, &answer);
                    }
                }
                Output::ShowSynAck { client } => shown.push(client),
                _ => {}
            }
        }
    }
}

fn opened(number: u16) -> DataPlaneEvent {
    DataPlaneEvent::Opened {
        record: record(client(number), legs(&[0, 1, 2])),
    }
}

fn is_shown(outputs: &[Output]) -> bool {
    let is_shown = |output: &Output| matches!(output, Output::ShowSynAck { .. });
    outputs.iter().any(is_shown)
}

fn clients_of(copy: &BackupCopy) -> Vec<SocketAddr> {
    copy.connections().map(|record| record.client).collect()
}

#[test]
fn handshake_waits_for_the_backup() {
    let (mut machine, mut copy) = machine_and_copy();
    machine.handle_data_plane(ms(1), opened(1));
    let first = outputs(&mut machine);
    assert!(!is_shown(&first), "{first:?}");
    let [Output::Send { frame, .. }] = &first[..] else {
        panic!("not one frame: {first:?}");
    };
    let answer = copy.handle_frame(frame.clone()).expect("an answer");
    assert_eq!(clients_of(&copy), [client(1)]);
    machine.handle_frame(ms(2), BACKUP, &answer);
    let client = client(1);
    assert_eq!(outputs(&mut machine), [Output::ShowSynAck { client }]);
}

#[test]
fn handshakes_during_a_round_trip_share_a_frame() {
    let (mut machine, mut copy) = machine_and_copy();
    for number in 1..=5 {
        machine.handle_data_plane(ms(1), opened(number));
    }
    let first = outputs(&mut machine);
    assert_eq!(first.len(), 1, "{first:?}");
    let Output::Send { frame, .. } = &first[0] else {
        panic!("not a frame: {first:?}");
    };
    let answer = copy.handle_frame(frame.clone()).expect("an answer");
    machine.handle_frame(ms(2), BACKUP, &answer);
    assert_eq!(exchange(&mut machine, &mut copy, ms(3)).len(), 5);
    assert_eq!(clients_of(&copy).len(), 5);
}

#[test]
fn other_changes_leave_within_10_ms() {
    let (mut machine, mut copy) = machine_and_copy();
    machine.handle_data_plane(ms(1), opened(1));
    exchange(&mut machine, &mut copy, ms(2));
    machine.handle_data_plane(ms(3), reset(1, 1, 0));
    exchange(&mut machine, &mut copy, ms(3));
    assert_eq!(machine.poll_timeout(), Some(ms(13)));
    machine.handle_timeout(ms(13));
    exchange(&mut machine, &mut copy, ms(13));
    let record = copy.connections().next().expect("a record");
    assert_eq!(record.live, legs(&[0, 2]));
    let closed = DataPlaneEvent::Closed { client: client(1) };
    machine.handle_data_plane(ms(20), closed);
    machine.handle_timeout(ms(30));
    exchange(&mut machine, &mut copy, ms(30));
    assert!(clients_of(&copy).is_empty());
}

#[test]
fn promotion_reaches_the_backup_at_once() {
    let (mut machine, mut copy) = machine_and_copy();
    machine.handle_data_plane(ms(1), opened(1));
    exchange(&mut machine, &mut copy, ms(1));
    machine.handle_server(ms(2), NODES[0], &ServerState::Absent);
    exchange(&mut machine, &mut copy, ms(2));
    let roles = copy.roles().expect("roles");
    assert_eq!((roles.primary, roles.live), (leg(1), legs(&[1, 2])));
    let record = copy.connections().next().expect("a record");
    assert_eq!(record.live, legs(&[1, 2]));
}

#[test]
fn backup_that_does_not_acknowledge_holds_up_no_client_for_long() {
    let (mut machine, mut copy) = machine_and_copy();
    machine.handle_data_plane(ms(100), opened(1));
    assert!(!is_shown(&outputs(&mut machine)));
    hear_all(&mut machine, ms(250));
    machine.handle_timeout(ms(300));
    let all = outputs(&mut machine);
    assert!(is_shown(&all), "{all:?}");
    assert!(events(&all).contains(&Event::BackupLost { node: BACKUP }));
    let shown = feed(&mut machine, ms(310), opened(2));
    assert!(is_shown(&shown), "{shown:?}");
    hear_all(&mut machine, ms(1_250));
    machine.handle_timeout(ms(1_300));
    exchange(&mut machine, &mut copy, ms(1_300));
    assert_eq!(clients_of(&copy), [client(1), client(2)]);
}

#[test]
fn missing_frame_leads_to_a_snapshot() {
    let (mut machine, mut copy) = machine_and_copy();
    machine.handle_data_plane(ms(1), opened(1));
    // The frame is lost.
    outputs(&mut machine);
    machine.handle_data_plane(ms(2), opened(2));
    machine.handle_timeout(ms(12));
    exchange(&mut machine, &mut copy, ms(12));
    assert_eq!(clients_of(&copy), [client(1), client(2)]);
}

#[test]
fn snapshot_of_many_connections_has_several_parts() {
    let (mut machine, _) = machine_and_copy();
    let mut copy = BackupCopy::new(config().service, 10_000);
    machine.handle_peer_lost(ms(1), BACKUP);
    for number in 1..=2_500 {
        machine.handle_data_plane(ms(2), opened(number));
    }
    outputs(&mut machine);
    hear_all(&mut machine, ms(1_000));
    machine.handle_timeout(ms(1_001));
    let mut parts = 0;
    loop {
        let all = outputs(&mut machine);
        if all.is_empty() {
            break;
        }
        for output in all {
            let Output::Send { frame, .. } = output else {
                continue;
            };
            let is_part = matches!(frame, ReplicationFrame::Snapshot { .. });
            assert!(!is_part || !copy.is_complete());
            parts += usize::from(is_part);
            let answer = copy.handle_frame(frame).expect("an answer");
            if is_part && parts == 2 {
                // A connection that the first part had ends, and one that no part had begins.
                let closed = DataPlaneEvent::Closed { client: client(1) };
                machine.handle_data_plane(ms(1_002), closed);
                machine.handle_data_plane(ms(1_002), opened(60_000));
            }
            machine.handle_frame(ms(1_002), BACKUP, &answer);
        }
    }
    machine.handle_timeout(ms(1_012));
    exchange(&mut machine, &mut copy, ms(1_012));
    assert!(parts >= 3, "{parts}");
    assert!(copy.is_complete());
    let clients = clients_of(&copy);
    assert_eq!(clients.len(), 2_500);
    assert!(!clients.contains(&client(1)) && clients.contains(&client(60_000)));
}

#[test]
fn copy_forgets_connections_that_a_snapshot_does_not_name_at_its_end() {
    let (mut machine, mut copy) = machine_and_copy();
    machine.handle_data_plane(ms(1), opened(1));
    machine.handle_data_plane(ms(1), opened(2));
    exchange(&mut machine, &mut copy, ms(1));
    machine.handle_peer_lost(ms(2), BACKUP);
    machine.handle_data_plane(ms(3), DataPlaneEvent::Closed { client: client(1) });
    assert_eq!(clients_of(&copy), [client(1), client(2)]);
    hear_all(&mut machine, ms(1_000));
    machine.handle_timeout(ms(1_002));
    exchange(&mut machine, &mut copy, ms(1_002));
    assert_eq!(clients_of(&copy), [client(2)]);
}

#[test]
fn frames_of_an_earlier_term_or_another_service_change_nothing() {
    let (mut machine, mut copy) = machine_and_copy();
    machine.handle_data_plane(ms(1), opened(1));
    exchange(&mut machine, &mut copy, ms(1));
    let snapshot = |term, service| ReplicationFrame::Snapshot {
        term,
        service,
        sequence: 1,
        roles: machine.roles(),
        records: Vec::new(),
        is_first: true,
        is_last: true,
    };
    let service = config().service;
    let other = ServiceEndpoint {
        address: client(1),
        ..service
    };
    assert_eq!(copy.handle_frame(snapshot(0, service)), None);
    assert_eq!(copy.handle_frame(snapshot(9, other)), None);
    assert_eq!(clients_of(&copy), [client(1)]);
    assert!(copy.handle_frame(snapshot(9, service)).is_some());
    assert!(clients_of(&copy).is_empty());
}

#[test]
fn successor_goes_on_with_the_connections_and_roles_of_the_copy() {
    let (mut machine, mut copy) = machine_and_copy();
    machine.handle_data_plane(ms(1), opened(1));
    machine.handle_data_plane(ms(1), opened(2));
    machine.handle_data_plane(ms(1), reset(2, 2, 0));
    machine.handle_server(ms(2), NODES[0], &ServerState::Absent);
    exchange(&mut machine, &mut copy, ms(2));
    let next = View {
        epoch: 2,
        contact_node: BACKUP,
        ..view(&[])
    };
    let own = ReplicatedServiceConfig {
        node: BACKUP,
        ..config()
    };
    let mut successor = Replication::succeed(ms(10), own, &copy, &next).expect("legs");
    let all = outputs(&mut successor);
    assert_eq!(last_roles(&all), Some((leg(1), legs(&[1, 2]))));
    let adopted = all
        .iter()
        .filter(|output| matches!(output, Output::Adopt(_)));
    assert_eq!(adopted.count(), 2);
    let own_roles = Output::SetConnectionRoles {
        client: client(2),
        primary: leg(1),
        live: legs(&[1]),
        follows_service_roles: false,
    };
    assert!(all.contains(&own_roles), "{all:?}");
    // Nobody compared the output that was on its way.
    assert_eq!(
        successor.promote(ms(11), leg(2)),
        Err(CommandError::InDoubt(leg(2)))
    );
    feed(&mut successor, ms(12), progress(1, 0, [0; 4]));
    assert_eq!(successor.promote(ms(13), leg(2)), Ok(()));
}

#[test]
fn leg_that_left_a_connection_before_the_succession_leaves_when_there_is_input() {
    let (mut machine, mut copy) = machine_and_copy();
    machine.handle_data_plane(ms(1), opened(1));
    machine.handle_data_plane(ms(1), reset(1, 2, 50));
    // Changed roles leave at once, and take the change along.
    machine.handle_server(ms(2), NODES[0], &ServerState::Absent);
    exchange(&mut machine, &mut copy, ms(2));
    let next = View {
        epoch: 2,
        contact_node: BACKUP,
        ..view(&[])
    };
    let own = ReplicatedServiceConfig {
        node: BACKUP,
        ..config()
    };
    let mut successor = Replication::succeed(ms(10), own, &copy, &next).expect("legs");
    outputs(&mut successor);
    // The data plane knows nothing yet.
    let unknown = feed(&mut successor, ms(11), progress(1, 0, [0; 4]));
    assert_eq!(drops(&unknown), []);
    let known = feed(&mut successor, ms(12), progress(1, 3 << 30, [0; 4]));
    assert_eq!(drops(&known), [(leg(2), DropReason::MissedInput)]);
}

#[test]
fn empty_copy_has_no_successor() {
    let copy = BackupCopy::new(config().service, 10);
    let successor = Replication::succeed(ms(0), config(), &copy, &view(&[]));
    assert_eq!(successor.err(), Some(CommandError::NoLegs));
}
