//! Impossible requests by the operator.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use holdfast_api::control::{FlowFilter, FlowOutcome, FlowSelection};
use holdfast_testbed::cluster::{STALLS_MAX, is_node_stall};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::common::{LoadedGroup, PATIENCE, assert_contains, stop_process};

#[test]
fn impossible_requests_are_refused() {
    let Some(world) = LoadedGroup::up("requests") else {
        return;
    };
    unknown_names_are_refused(&world);
    flow_of_other_node_is_refused(&world);
    duplicate_flow_is_handed_off_once(&world);
    flow_in_transit_is_refused(&world);
    malformed_requests_are_refused(&world);
    world.finish();
}

fn unknown_names_are_refused(world: &LoadedGroup) {
    let flow = world.flow(0);
    let unknown = "tcp:10.9.9.9:7-10.9.9.8:4242".parse().unwrap();
    let refused = world.hand_off("n2", &[unknown], "n3").unwrap_err();
    assert_contains(
        refused,
        &["tcp:10.9.9.9:7", "has no such flow", "flow list", "n1"],
    );
    let refused = world.hand_off("n2", &[flow], "n9").unwrap_err();
    assert_contains(refused, &["no node n9", "holdfast status"]);
    let refused = world.hand_off("n2", &[flow], "n2").unwrap_err();
    assert_contains(refused, &["n2 is this node"]);
    let refused = world.hand_off("n2", &[], "n3").unwrap_err();
    assert_contains(refused, &["no flow of this node matches"]);
    let refused = world.hand_off_selection("n2", all_of_pool("nowhere"), "n3");
    assert_contains(refused.unwrap_err(), &["no service has the pool nowhere"]);
    let nothing = world.hand_off_selection("n2", all_of_pool("odd"), "n3");
    let nothing = nothing.expect("a handoff of no flow succeeds");
    assert_eq!(nothing.flows, 0);
    let status = world.wait_for_handoff("n2", nothing.id);
    assert_eq!((status.summary.total, status.results.len()), (0, 0));
    world.assert_unharmed();

    // One unknown flow of several does not affect the others.
    let id = world.hand_off("n2", &[flow, unknown], "n3").unwrap().id;
    for result in world.wait_for_handoff("n2", id).results {
        match result.outcome {
            FlowOutcome::Moved => assert_eq!(result.flow, flow),
            FlowOutcome::Kept { reason, .. } => assert_contains(reason, &["has no such flow"]),
            FlowOutcome::Pending => panic!("{result:?}"),
        }
    }
    assert_eq!(world.owner(flow).as_deref(), Some("n3"));
    world.assert_unharmed();
}

fn all_of_pool(pool: &str) -> FlowSelection {
    FlowSelection::AllOf(FlowFilter {
        pool: Some(pool.to_owned()),
        ..FlowFilter::default()
    })
}

fn flow_of_other_node_is_refused(world: &LoadedGroup) {
    let flow = world.flow(0);
    for node in ["n1", "n2"] {
        let refused = world.hand_off(node, &[flow], if node == "n1" { "n2" } else { "n1" });
        assert_contains(
            refused.unwrap_err(),
            &["node n3 owns the flow", "holdfast handoff"],
        );
    }
    world.assert_moves("n3", flow, "n2");
    world.assert_unharmed();
}

fn duplicate_flow_is_handed_off_once(world: &LoadedGroup) {
    let flow = world.flow(1);
    let accepted = world.hand_off("n2", &[flow, flow], "n3").unwrap();
    assert_eq!(accepted.flows, 1);
    let status = world.wait_for_handoff("n2", accepted.id);
    assert_eq!((status.summary.moved, status.summary.kept), (1, 0));
    world.assert_moves("n3", flow, "n2");
    world.assert_unharmed();
}

/// While the acceptor's program is stopped, the flow is in transit and a second handoff is refused; the first then
/// fails with a named reason.
fn flow_in_transit_is_refused(world: &LoadedGroup) {
    let flow = world.flow(2);
    let program = world.cluster.program_pid("n3", "echo").unwrap().unwrap();
    let program = Pid::from_raw(program);
    stop_process(program);
    let mut late_results = 0;
    let reason = loop {
        let id = world.hand_off("n2", &[flow], "n3").unwrap().id;
        let second_refusal = world.hand_off("n2", &[flow], "n1").unwrap_err();
        assert_contains(second_refusal, &["is moving already", "try again"]);
        world.assert_unharmed();
        match world.wait_for_handoff("n2", id).results.remove(0).outcome {
            FlowOutcome::Kept { reason, .. }
                if is_node_stall(&reason) && late_results < STALLS_MAX =>
            {
                late_results += 1
            }
            FlowOutcome::Kept { reason, .. } => break reason,
            other => panic!("{other:?}"),
        }
    };
    kill(program, Signal::SIGCONT).unwrap();
    assert_contains(reason, &["did not take the flow within"]);
    world.assert_unharmed();
    world.assert_moves("n2", flow, "n3");
    world.assert_moves("n3", flow, "n2");
}

fn malformed_requests_are_refused(world: &LoadedGroup) {
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
    for (body, status, error_parts) in cases {
        let length = body.len();
        let answer = send_raw_request(
            world,
            &format!(
                "POST /v1/handoffs HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
            ),
        );
        assert_contains(&answer, &[status, "what_to_do"]);
        assert_contains(&answer, error_parts);
    }
    let length = (16 << 20) + 1;
    let huge_request = format!(
        "POST /v1/handoffs HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{}",
        " ".repeat(length)
    );
    assert_contains(
        send_raw_request(world, &huge_request),
        &["413", "what_to_do"],
    );
    let wrong_path = "GET /v2/status HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n";
    assert_contains(
        send_raw_request(world, wrong_path),
        &["404", "there is no such path"],
    );
    let wrong_method = "DELETE /v1/flows HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n";
    assert_contains(send_raw_request(world, wrong_method), &["405"]);
    let bad_flow = "GET /v1/flows/nonsense HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n";
    assert_contains(send_raw_request(world, bad_flow), &["400", "nonsense"]);
    assert_contains(send_raw_request(world, "\0\u{7f}\r\n\r\n"), &["400"]);
    world.assert_unharmed();
}

/// Sends bytes to n2's control socket and returns the answer.
fn send_raw_request(world: &LoadedGroup, request: &str) -> String {
    let path = world.cluster.run_path("n2", "control.sock").unwrap();
    let mut stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    // A server that refuses an oversized request does not read it to the end, so the write may fail.
    let _ = stream.write_all(request.as_bytes());
    let mut answer = Vec::new();
    // Unread request data turns the close into a reset; the answer arrives before it.
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}
