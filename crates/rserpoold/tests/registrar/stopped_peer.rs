//! A registrar that is stopped while another one has updates for it.

use std::path::Path;

use super::*;
use nix::sys::signal::Signal;

/// Number of elements with long handles: their updates exceed the send buffer of an association, but stay below the
/// limit at which a registrar gives up on a peer.
const ELEMENTS: u32 = 1_600;
const HANDLE_LEN: usize = 1_000;
/// Starts a registrar that never declares a peer dead, however slow the machine is.
fn start_patient_registrar(directory: &Path, extra_config: &str) -> Daemon {
    let text = format!(
        r#"
[registrar]
listen = ["127.0.0.1"]
asap_port = 0
enrp_port = 0
raw = false
encapsulation_port = 0
run_dir = "{}"
heartbeat_cycle_ms = 500
last_heard_max_ms = 600000
[access]
registrar = ["127.0.0.1"]
[limits]
messages_per_second = 1000000
[sctp]
path_retransmissions = 1000
association_retransmissions = 1000
{extra_config}"#,
        directory.display()
    );
    Daemon::start_configured(directory, &text)
}

/// Number of registrations in flight.
const IN_FLIGHT_MAX: usize = 200;

#[test]
fn stopped_registrar_receives_all_updates_later() {
    let directory = tempfile::tempdir().expect("a directory");
    let in_directory = |name: &str| directory.path().join(name);
    let mut host = TestHost::open("127.0.0.1");
    let first = start_patient_registrar(&in_directory("first"), "");
    wait_until_ready(&mut host, &first);
    let second = start_patient_registrar(&in_directory("second"), &first.peer_configuration());
    wait_until_ready(&mut host, &second);
    let at = connect(&mut host, &first);
    let handle = PoolHandle::from("x".repeat(HANDLE_LEN).as_str());
    register(&mut host, at, &handle, ElementId(1));
    wait_for_equal_checksums(&mut host, &first, &second, 1);

    second.signal(Signal::SIGSTOP);
    let mut requested = 1;
    let mut answered = 1;
    wait_for(&mut host, "all registrations", |host| {
        while requested < ELEMENTS && requested - answered < IN_FLIGHT_MAX as u32 {
            requested += 1;
            host.register(at, &handle, ElementId(requested));
        }
        let is_answer = |message: &Message| matches!(message, Message::RegistrationResponse { .. });
        while host.take_message(at, is_answer).is_some() {
            answered += 1;
        }
        (answered == ELEMENTS).then_some(())
    });
    second.signal(Signal::SIGCONT);
    wait_for_equal_checksums(&mut host, &first, &second, ELEMENTS.into());
    let sent = first.status().expect("a registrar").counters;
    let received = second.status().expect("a registrar").counters;
    assert_eq!(sent.sends_refused, 0);
    let update_counts = (received.updates_received, received.resynchronisations);
    assert_eq!(update_counts, (ELEMENTS.into(), 0));
}
