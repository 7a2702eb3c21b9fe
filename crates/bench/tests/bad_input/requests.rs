//! Impossible requests by the operator.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use holdfast_api::control::FlowOutcome;
use holdfast_bench::cluster::{LATE_MAX, was_late};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::common::{PATIENCE, World, says, stop};

#[test]
fn requests_that_cannot_be_met() {
    let Some(world) = World::up("requests") else {
        return;
    };
    names_that_are_not_there(&world);
    owned_elsewhere(&world);
    named_twice(&world);
    moving_already(&world);
    malformed(&world);
    world.end();
}

fn names_that_are_not_there(world: &World) {
    let flow = world.flow(0);
    let unknown = "tcp:10.9.9.9:7-10.9.9.8:4242".parse().unwrap();
    let refused = world.hand_off("n2", &[unknown], "n3").unwrap_err();
    says(
        refused,
        &["tcp:10.9.9.9:7", "knows no such flow", "flow list", "n1"],
    );
    let refused = world.hand_off("n2", &[flow], "n9").unwrap_err();
    says(refused, &["no node n9", "holdfast status"]);
    let refused = world.hand_off("n2", &[flow], "n2").unwrap_err();
    says(refused, &["n2 is this node"]);
    let refused = world.hand_off("n2", &[], "n3").unwrap_err();
    says(refused, &["no flow of this node matches"]);
    world.unharmed();

    // One unknown flow of several does not affect the others.
    let id = world.hand_off("n2", &[flow, unknown], "n3").unwrap().id;
    for result in world.ended("n2", id).results {
        match result.outcome {
            FlowOutcome::Moved => assert_eq!(result.flow, flow),
            FlowOutcome::Kept { reason } => says(reason, &["knows no such flow"]),
            FlowOutcome::Pending => panic!("{result:?}"),
        }
    }
    assert_eq!(world.owner(flow).as_deref(), Some("n3"));
    world.unharmed();
}

fn owned_elsewhere(world: &World) {
    let flow = world.flow(0);
    for node in ["n1", "n2"] {
        let refused = world.hand_off(node, &[flow], if node == "n1" { "n2" } else { "n1" });
        says(refused.unwrap_err(), &["node n3 owns it", "ask there"]);
    }
    world.moves("n3", flow, "n2");
    world.unharmed();
}

fn named_twice(world: &World) {
    let flow = world.flow(1);
    let accepted = world.hand_off("n2", &[flow, flow], "n3").unwrap();
    assert_eq!(accepted.flows, 1);
    let status = world.ended("n2", accepted.id);
    assert_eq!((status.summary.moved, status.summary.kept), (1, 0));
    world.moves("n3", flow, "n2");
    world.unharmed();
}

/// While the acceptor's program is stopped, the flow is in transit and a second handoff is refused; the first then
/// fails with a named reason.
fn moving_already(world: &World) {
    let flow = world.flow(2);
    let program = world.cluster.program_pid("n3", "echo").unwrap().unwrap();
    let program = Pid::from_raw(program);
    stop(program);
    let mut late = 0;
    let reason = loop {
        let id = world.hand_off("n2", &[flow], "n3").unwrap().id;
        let again = world.hand_off("n2", &[flow], "n1").unwrap_err();
        says(again, &["is moving already", "try again"]);
        world.unharmed();
        match world.ended("n2", id).results.remove(0).outcome {
            FlowOutcome::Kept { reason } if was_late(&reason) && late < LATE_MAX => late += 1,
            FlowOutcome::Kept { reason } => break reason,
            other => panic!("{other:?}"),
        }
    };
    kill(program, Signal::SIGCONT).unwrap();
    says(reason, &["did not take it within"]);
    world.unharmed();
    world.moves("n2", flow, "n3");
    world.moves("n3", flow, "n2");
}

fn malformed(world: &World) {
    let flow = world.flow(3).to_string();
    let cases: [(String, &str, &[&str]); 7] = [
        ("{".into(), "400", &["the body", "openapi"]),
        (
            r#"{"flows":["tcp:x"],"to":"n3"}"#.into(),
            "400",
            &["the body"],
        ),
        (
            r#"{"to":"n3"}"#.into(),
            "400",
            &["the body", "flows", "all_of"],
        ),
        (
            format!(r#"{{"flows":["{flow}"],"to":"n3","drian":"none"}}"#),
            "400",
            &["unknown field", "drian"],
        ),
        (
            r#"{"all_of":{"pol":"echo"},"to":"n3"}"#.into(),
            "400",
            &["unknown field", "pol"],
        ),
        (
            format!(r#"{{"flows":["{flow}"],"all_of":{{}},"to":"n3"}}"#),
            "400",
            &["the body"],
        ),
        ("[]".into(), "400", &["the body"]),
    ];
    for (body, status, words) in cases {
        let length = body.len();
        let answer = speak(
            world,
            &format!(
                "POST /v1/handoffs HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
            ),
        );
        says(&answer, &[status, "what_to_do"]);
        says(&answer, words);
    }
    let length = (16 << 20) + 1;
    let huge = format!(
        "POST /v1/handoffs HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{}",
        " ".repeat(length)
    );
    says(speak(world, &huge), &["413", "what_to_do"]);
    let path = "GET /v2/status HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n";
    says(speak(world, path), &["404", "there is no such path"]);
    let method = "DELETE /v1/flows HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n";
    says(speak(world, method), &["405"]);
    let flow = "GET /v1/flows/nonsense HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n";
    says(speak(world, flow), &["400", "nonsense"]);
    says(speak(world, "\0\u{7f}\r\n\r\n"), &["400"]);
    world.unharmed();
}

/// Sends bytes to n2's control socket and returns the answer.
fn speak(world: &World, request: &str) -> String {
    let path = world.cluster.run_file("n2", "control.sock").unwrap();
    let mut stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    // A server that refuses an oversized request does not read it to the end, so the write may fail.
    let _ = stream.write_all(request.as_bytes());
    let mut answer = Vec::new();
    // Unread request data turns the close into a reset; the answer arrives before it.
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}
