//! Server programs that hang or die while they give or take connections.

use std::io::Read;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use holdfast_api::FlowText;
use holdfast_api::app::{FromDaemon, ToDaemon};
use holdfast_api::control::FlowOutcome;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::common::{LoadedGroup, PATIENCE, assert_contains, eventually, stop_process};
use crate::scripted_program::{ScriptedProgram, assert_data_passes, listener_in, open_connection};

#[test]
fn hanging_or_dying_program_loses_no_connection() {
    let Some(world) = LoadedGroup::up("programs") else {
        return;
    };
    let listener = listener_in(&world, "n2", world.odd_address(), false);
    let connect = || open_connection(&world, &listener);
    donor_program_hangs(&world, connect());
    acceptor_program_hangs(&world, connect());
    acceptor_program_dies(&world, connect());
    donor_program_dies_after_collect(&world, connect());
    donor_program_dies_before_answer(&world, connect());
    killed_echo_loses_no_connection(&world);
    world.finish();
}

type ServedConnection = (TcpStream, TcpStream, FlowText);

/// The program never reaches a safe point: the operator gets an error within 10 s, and a late answer moves nothing.
fn donor_program_hangs(world: &LoadedGroup, (mut client, mut server, flow): ServedConnection) {
    let program = ScriptedProgram::open(world, "n2");
    program.serve_odd_pool(world);
    program.report_accepted(flow);
    wait_until_program_known(world, flow);
    let id = world.hand_off("n2", &[flow], "n3").unwrap().id;
    assert!(
        matches!(program.receive(), FromDaemon::HandoffRequested { flows, .. } if flows == [flow])
    );
    // Handoffs of other programs do not wait for this program.
    world.assert_moves("n2", world.flow(0), "n3");
    world.assert_moves("n3", world.flow(0), "n2");
    match world.wait_for_handoff("n2", id).results.remove(0).outcome {
        FlowOutcome::Kept { reason, .. } => {
            assert_contains(reason, &["did not reach a safe point within 10 s"])
        }
        other => panic!("{other:?}"),
    }
    program.hand_off(flow, "n3", Some(server.as_fd()));
    assert_contains(program.receive_kept_reason(flow), &["answered too late"]);
    assert_data_passes(&mut client, &mut server);
    world.assert_unharmed();
}

/// The acceptor's program never confirms that it has received the connection; after the daemon cancels, the program
/// goes on as well.
fn acceptor_program_hangs(world: &LoadedGroup, (mut client, mut server, flow): ServedConnection) {
    let program = ScriptedProgram::open(world, "n2");
    program.report_accepted(flow);
    let acceptor_program = ScriptedProgram::open(world, "n3");
    acceptor_program.serve_odd_pool(world);
    wait_until_pool_served(world);
    let start = Instant::now();
    program.hand_off(flow, "n3", Some(server.as_fd()));
    let (id, socket) = receive_incoming(&acceptor_program);
    assert_contains(
        program.receive_kept_reason(flow),
        &["node 3", "did not take the flow within"],
    );
    assert!(start.elapsed() < PATIENCE / 2, "{:?}", start.elapsed());
    assert_data_passes(&mut client, &mut server);
    let cancel_message = acceptor_program.receive();
    assert!(matches!(cancel_message, FromDaemon::Cancel { ids, .. } if ids == [id]));
    drop(socket);
    // A late confirmation has no effect.
    acceptor_program.send(&ToDaemon::Received { ids: vec![id] });
    assert_data_passes(&mut client, &mut server);
    world.assert_unharmed();

    // The next connection arrives.
    program.hand_off(flow, "n3", Some(server.as_fd()));
    let (id, socket) = receive_incoming(&acceptor_program);
    acceptor_program.send(&ToDaemon::Received { ids: vec![id] });
    assert!(matches!(acceptor_program.receive(), FromDaemon::Activate { ids } if ids == [id]));
    assert!(matches!(program.receive(), FromDaemon::Moved { flows, .. } if flows == [flow]));
    drop(server);
    assert_data_passes(&mut client, &mut as_stream(socket));
    world.assert_unharmed();
}

fn acceptor_program_dies(world: &LoadedGroup, (mut client, mut server, flow): ServedConnection) {
    let program = ScriptedProgram::open(world, "n2");
    program.report_accepted(flow);
    let acceptor_program = ScriptedProgram::open(world, "n3");
    acceptor_program.serve_odd_pool(world);
    wait_until_pool_served(world);
    program.hand_off(flow, "n3", Some(server.as_fd()));
    // All descriptors of the program close at once, as when it is killed.
    drop(receive_incoming(&acceptor_program));
    drop(acceptor_program);
    assert_contains(
        program.receive_kept_reason(flow),
        &["the acceptor's server program has ended"],
    );
    assert_data_passes(&mut client, &mut server);
    world.assert_unharmed();
}

/// Once the daemon has the descriptor and state, the connection outlives the program that gave it.
fn donor_program_dies_after_collect(
    world: &LoadedGroup,
    (mut client, server, flow): ServedConnection,
) {
    let program = ScriptedProgram::open(world, "n2");
    program.report_accepted(flow);
    let acceptor_program = ScriptedProgram::open(world, "n3");
    acceptor_program.serve_odd_pool(world);
    wait_until_pool_served(world);
    program.hand_off(flow, "n3", Some(server.as_fd()));
    let (id, socket) = receive_incoming(&acceptor_program);
    drop(server);
    drop(program);
    acceptor_program.send(&ToDaemon::Received { ids: vec![id] });
    assert!(matches!(acceptor_program.receive(), FromDaemon::Activate { ids } if ids == [id]));
    assert_data_passes(&mut client, &mut as_stream(socket));
    assert_eq!(world.owner(flow).as_deref(), Some("n3"));
    world.assert_unharmed();
}

/// The program ends before it answers: the operator gets an error at once. (The connection ends with its program, as on
/// any host.)
fn donor_program_dies_before_answer(
    world: &LoadedGroup,
    (mut client, server, flow): ServedConnection,
) {
    let program = ScriptedProgram::open(world, "n2");
    program.report_accepted(flow);
    wait_until_program_known(world, flow);
    let id = world.hand_off("n2", &[flow], "n3").unwrap().id;
    assert!(matches!(
        program.receive(),
        FromDaemon::HandoffRequested { .. }
    ));
    drop(program);
    match world.wait_for_handoff("n2", id).results.remove(0).outcome {
        FlowOutcome::Kept { reason, .. } => {
            assert_contains(reason, &["the flow's server program has ended"])
        }
        other => panic!("{other:?}"),
    }
    drop(server);
    assert_eq!(client.read(&mut [0; 8]).unwrap(), 0);
    world.assert_unharmed();
}

/// A real echo program is killed while many connections arrive: all of them stay with the donor.
fn killed_echo_loses_no_connection(world: &LoadedGroup) {
    let pid = || world.cluster.program_pid("n3", "echo").unwrap();
    let program = Pid::from_raw(pid().unwrap());
    stop_process(program);
    let flows: Vec<FlowText> = (0..32).map(|member| world.flow(member)).collect();
    let id = world.hand_off("n2", &flows, "n3").unwrap().id;
    assert_contains(
        world.hand_off("n2", &[flows[0]], "n3").unwrap_err(),
        &["is moving already"],
    );
    kill(program, Signal::SIGKILL).unwrap();
    let status = world.wait_for_handoff("n2", id);
    assert_eq!(
        (status.summary.moved, status.summary.kept),
        (0, 32),
        "{status:#?}"
    );
    for result in status.results {
        match result.outcome {
            FlowOutcome::Kept { reason, .. } => assert_contains(reason, &["node 3"]),
            other => panic!("{other:?}"),
        }
    }
    world.assert_unharmed();
}

/// Waits until n2 knows which program has a flow.
fn wait_until_program_known(world: &LoadedGroup, flow: FlowText) {
    let control = world.cluster.blocking_control_client("n2").unwrap();
    eventually("the program of the flow is known", || {
        let detail = control.run(async |client| client.flow(&flow).await);
        detail.is_ok_and(|detail| detail.entry.program.is_some())
    });
}

/// Waits until a program takes flows of the pool `odd` on n3.
fn wait_until_pool_served(world: &LoadedGroup) {
    let control = world.cluster.blocking_control_client("n3").unwrap();
    eventually("a program serves the pool", || {
        let status = control.run(async |client| client.status().await).unwrap();
        let mut pools = status.programs.iter().flat_map(|program| &program.pools);
        pools.any(|pool| pool == "odd")
    });
}

/// Receives the next incoming connection and its state.
fn receive_incoming(receiving_program: &ScriptedProgram) -> (u64, OwnedFd) {
    let (message, descriptors) = receiving_program.receive_with_descriptors();
    let FromDaemon::Incoming { items } = message else {
        panic!("{message:?}")
    };
    let state = receiving_program.receive();
    assert!(
        matches!(state, FromDaemon::State { last: true, .. }),
        "{state:?}"
    );
    (items[0].id, descriptors.into_iter().next().unwrap())
}

fn as_stream(socket: OwnedFd) -> TcpStream {
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}
