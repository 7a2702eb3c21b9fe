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

use crate::common::{PATIENCE, World, eventually, says, stop};
use crate::strange::{Strange, both_speak, connection, listener_in};

#[test]
fn programs_that_hang_or_die() {
    let Some(world) = World::up("programs") else {
        return;
    };
    let listener = listener_in(&world, "n2", world.odd(), false);
    let connect = || connection(&world, &listener);
    never_gives(&world, connect());
    never_takes(&world, connect());
    dies_while_taking(&world, connect());
    dies_while_giving(&world, connect());
    dies_when_asked(&world, connect());
    echo_killed_while_taking(&world);
    world.end();
}

type Connected = (TcpStream, TcpStream, FlowText);

/// The program never reaches a safe point: the operator gets an error within 10 s, and a late answer moves nothing.
fn never_gives(world: &World, (mut client, mut server, flow): Connected) {
    let program = Strange::open(world, "n2");
    program.serves(world);
    program.accepted(flow);
    known(world, flow);
    let id = world.hand_off("n2", &[flow], "n3").unwrap().id;
    assert!(matches!(program.hear(), FromDaemon::Asked { flows, .. } if flows == [flow]));
    // Handoffs of other programs do not wait for this program.
    world.moves("n2", world.flow(0), "n3");
    world.moves("n3", world.flow(0), "n2");
    match world.ended("n2", id).results.remove(0).outcome {
        FlowOutcome::Kept { reason } => says(reason, &["did not answer within 10 s", "safe point"]),
        other => panic!("{other:?}"),
    }
    program.hand_off(flow, "n3", Some(server.as_fd()));
    says(program.kept(flow), &["answered too late"]);
    both_speak(&mut client, &mut server);
    world.unharmed();
}

/// The acceptor's program never confirms that it has received the connection; after the daemon cancels, the program
/// goes on as well.
fn never_takes(world: &World, (mut client, mut server, flow): Connected) {
    let program = Strange::open(world, "n2");
    program.accepted(flow);
    let taker = Strange::open(world, "n3");
    taker.serves(world);
    taking(world);
    let begun = Instant::now();
    program.hand_off(flow, "n3", Some(server.as_fd()));
    let (id, socket) = incoming(&taker);
    says(program.kept(flow), &["node 3", "did not take it within"]);
    assert!(begun.elapsed() < PATIENCE / 2, "{:?}", begun.elapsed());
    both_speak(&mut client, &mut server);
    let cancelled = taker.hear();
    assert!(matches!(cancelled, FromDaemon::Cancel { ids, .. } if ids == [id]));
    drop(socket);
    // A late confirmation has no effect.
    taker.say(&ToDaemon::Received { ids: vec![id] });
    both_speak(&mut client, &mut server);
    world.unharmed();

    // The next connection arrives.
    program.hand_off(flow, "n3", Some(server.as_fd()));
    let (id, socket) = incoming(&taker);
    taker.say(&ToDaemon::Received { ids: vec![id] });
    assert!(matches!(taker.hear(), FromDaemon::Go { ids } if ids == [id]));
    assert!(matches!(program.hear(), FromDaemon::Gone { flows, .. } if flows == [flow]));
    drop(server);
    both_speak(&mut client, &mut stream(socket));
    world.unharmed();
}

fn dies_while_taking(world: &World, (mut client, mut server, flow): Connected) {
    let program = Strange::open(world, "n2");
    program.accepted(flow);
    let taker = Strange::open(world, "n3");
    taker.serves(world);
    taking(world);
    program.hand_off(flow, "n3", Some(server.as_fd()));
    // All descriptors of the program close at once, as when it is killed.
    drop(incoming(&taker));
    drop(taker);
    says(
        program.kept(flow),
        &["the server program that was to take it has ended"],
    );
    both_speak(&mut client, &mut server);
    world.unharmed();
}

/// Once the daemon has the descriptor and state, the connection outlives the program that gave it.
fn dies_while_giving(world: &World, (mut client, server, flow): Connected) {
    let program = Strange::open(world, "n2");
    program.accepted(flow);
    let taker = Strange::open(world, "n3");
    taker.serves(world);
    taking(world);
    program.hand_off(flow, "n3", Some(server.as_fd()));
    let (id, socket) = incoming(&taker);
    drop(server);
    drop(program);
    taker.say(&ToDaemon::Received { ids: vec![id] });
    assert!(matches!(taker.hear(), FromDaemon::Go { ids } if ids == [id]));
    both_speak(&mut client, &mut stream(socket));
    assert_eq!(world.owner(flow).as_deref(), Some("n3"));
    world.unharmed();
}

/// The program ends before it answers: the operator gets an error at once. (The connection ends with its program, as on
/// any host.)
fn dies_when_asked(world: &World, (mut client, server, flow): Connected) {
    let program = Strange::open(world, "n2");
    program.accepted(flow);
    known(world, flow);
    let id = world.hand_off("n2", &[flow], "n3").unwrap().id;
    assert!(matches!(program.hear(), FromDaemon::Asked { .. }));
    drop(program);
    match world.ended("n2", id).results.remove(0).outcome {
        FlowOutcome::Kept { reason } => says(reason, &["its server program has ended"]),
        other => panic!("{other:?}"),
    }
    drop(server);
    assert_eq!(client.read(&mut [0; 8]).unwrap(), 0);
    world.unharmed();
}

/// A real echo program is killed while many connections arrive: all of them stay with the donor.
fn echo_killed_while_taking(world: &World) {
    let pid = || world.cluster.program_pid("n3", "echo").unwrap();
    let program = Pid::from_raw(pid().unwrap());
    stop(program);
    let flows: Vec<FlowText> = (0..32).map(|member| world.flow(member)).collect();
    let id = world.hand_off("n2", &flows, "n3").unwrap().id;
    says(
        world.hand_off("n2", &[flows[0]], "n3").unwrap_err(),
        &["is moving already"],
    );
    kill(program, Signal::SIGKILL).unwrap();
    let status = world.ended("n2", id);
    assert_eq!(
        (status.summary.moved, status.summary.kept),
        (0, 32),
        "{status:#?}"
    );
    for result in status.results {
        match result.outcome {
            FlowOutcome::Kept { reason } => says(reason, &["node 3"]),
            other => panic!("{other:?}"),
        }
    }
    world.unharmed();
}

/// Waits until n2 knows which program has a flow.
fn known(world: &World, flow: FlowText) {
    let control = world.cluster.control_blocking("n2").unwrap();
    eventually("the flow is known", || {
        let detail = control.run(async |client| client.flow(&flow).await);
        detail.is_ok_and(|detail| detail.entry.program.is_some())
    });
}

/// Waits until a program takes flows of the pool `odd` on n3.
fn taking(world: &World) {
    let control = world.cluster.control_blocking("n3").unwrap();
    eventually("a program takes flows", || {
        let status = control.run(async |client| client.status().await).unwrap();
        let mut pools = status.programs.iter().flat_map(|program| &program.pools);
        pools.any(|pool| pool == "odd")
    });
}

/// Receives the next incoming connection and its state.
fn incoming(taker: &Strange) -> (u64, OwnedFd) {
    let (message, descriptors) = taker.hear_with();
    let FromDaemon::Incoming { items } = message else {
        panic!("{message:?}")
    };
    let state = taker.hear();
    assert!(
        matches!(state, FromDaemon::State { last: true, .. }),
        "{state:?}"
    );
    (items[0].id, descriptors.into_iter().next().unwrap())
}

fn stream(socket: OwnedFd) -> TcpStream {
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}
