//! ASAP over TCP and TLS, between processes on loopback: admitted and refused clients, and service during floods.

#[path = "../registrar/daemon.rs"]
#[expect(dead_code, reason = "shared with the registrar's tests")]
mod daemon;
mod flood;
mod group;

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use daemon::Daemon as Registrar;
use group::{PoolDaemon, TestGroup, tcp_address, tls_address};
use holdfast_api::pool::ElementEvent;
use holdfast_wire::rserpool::PoolHandle;
use holdfast_wire::rserpool::asap::Message;

/// Longest wait for any condition that must become true.
const TIMEOUT: Duration = Duration::from_secs(180);

fn wait_for<T>(condition: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some(found) = poll() {
            return found;
        }
        assert!(Instant::now() < deadline, "exceeded time: {condition}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Returns `tls://NAME@ADDRESS` of a registrar.
fn tls_url(name: &str, registrar: &Registrar) -> String {
    format!("tls://{name}@{}", tls_address(registrar))
}

fn refused_connections(registrar: &Registrar) -> u64 {
    let status = registrar.status().expect("a registrar");
    status.counters.connections_refused
}

fn wait_until_resolved(user: &PoolDaemon, condition: &str) {
    wait_for(condition, || {
        let found = user.resolve().ok()?;
        (found.elements.len() == 1).then_some(())
    });
}

/// Returns the error of a user's resolution.
fn resolution_error(user: &PoolDaemon) -> String {
    user.resolve().expect_err("no answer").to_string()
}

#[test]
fn tls_clients_fail_over_to_another_registrar() {
    let group = TestGroup::new();
    let mut first = group.start_registrar("r1", "");
    let second = group.start_registrar("r2", &first.peer_configuration());
    for name in ["web", "app"] {
        group.issue(name);
    }
    let both = [tls_url("r1", &first), tls_url("r2", &second)];
    let pool = |name: &str, registrars: &[String]| {
        let directory = group.path(name);
        PoolDaemon::start(
            &directory,
            "127.0.0.1",
            registrars,
            &group.tls_section(name),
        )
    };
    // The element registers at the first registrar.
    let elements = pool("web", &both);
    let element = elements.register("127.0.0.1:80");
    let users = pool("app", &both);
    wait_until_resolved(&users, "the element");
    for registrar in [&first, &second] {
        wait_for("the element at each registrar", || registrar.pool("web"));
    }

    // A host without the right to register is told so.
    let unauthorised_element = users.register("127.0.0.1:81");
    let refusal = wait_for("a refusal", || {
        match unauthorised_element.next_event().expect("a channel") {
            Some(ElementEvent::Refused { reason }) => Some(reason),
            _ => None,
        }
    });
    assert!(refusal.contains("rejected for security"), "{refusal}");

    let home = first.status().expect("a registrar").own_elements == 1;
    let mut second = second;
    let (dead, survivor) = match home {
        true => (&mut first, &second),
        false => (&mut second, &first),
    };
    dead.kill();
    wait_for("a new home", || {
        let status = survivor.status()?;
        (status.own_elements == 1).then_some(())
    });
    wait_until_resolved(&users, "the element at the other registrar");
    // Without keep-alives over TLS the element would be removed soon.
    let keep_alives_of =
        |registrar: &Registrar| registrar.status().expect("one").counters.keep_alives;
    let before = keep_alives_of(survivor);
    wait_for("keep-alives", || {
        (keep_alives_of(survivor) > before + 5).then_some(())
    });
    assert_eq!(survivor.pool("web").expect("a pool").elements.len(), 1);
    drop(element);
    wait_for("its end", || survivor.pool("web").is_none().then_some(()));
}

#[test]
fn wrong_certificates_are_refused_on_both_sides() {
    let group = TestGroup::new();
    let registrar = group.start_registrar("r1", "");
    let foreign = TestGroup::new();
    for (name, authority) in [("app", &group), ("app", &foreign)] {
        authority.issue(name);
    }
    let user = |directory: &str, registrars: &[String], tls: &str| {
        PoolDaemon::start(&group.path(directory), "127.0.0.1", registrars, tls)
    };
    let registrar_url = tls_url("r1", &registrar);

    // A user with another authority: the user does not trust the registrar.
    let stranger = user(
        "foreign",
        std::slice::from_ref(&registrar_url),
        &foreign.tls_section("app"),
    );
    assert!(resolution_error(&stranger).contains("no registrar"));
    // The user trusts the registrar, but the registrar does not trust the user's certificate.
    let forged_tls = foreign.tls_section("app").replace(
        &foreign.path("ca/ca.pem").display().to_string(),
        &group.path("ca/ca.pem").display().to_string(),
    );
    let forged_tls = forged_tls.replace(
        &foreign.path("ca/ca.crl").display().to_string(),
        &group.path("ca/ca.crl").display().to_string(),
    );
    let before = refused_connections(&registrar);
    let impostor = user(
        "impostor",
        std::slice::from_ref(&registrar_url),
        &forged_tls,
    );
    assert!(impostor.resolve().is_err());
    assert!(refused_connections(&registrar) > before);

    // A member of the group, but not the registrar that the user named.
    let wrong_url = tls_url("r2", &registrar);
    let misled = user("misled", &[wrong_url], &group.tls_section("app"));
    assert!(resolution_error(&misled).contains("no registrar"));
    // A user that names no registrar accepts any member.
    let url_without_name = format!("tls://{}", tls_address(&registrar));
    let unnamed_user = user("easy", &[url_without_name], &group.tls_section("app"));
    assert!(resolution_error(&unnamed_user).contains("there is no pool"));
    let valid_user = user("good", &[registrar_url], &group.tls_section("app"));
    assert!(resolution_error(&valid_user).contains("there is no pool"));
}

#[test]
fn revoked_certificate_is_refused_and_ends_its_associations() {
    let group = TestGroup::new();
    let registrar = group.start_registrar("r1", "");
    for name in ["web", "app"] {
        group.issue(name);
    }
    let registrars = [tls_url("r1", &registrar)];
    let start = |directory: &str, name: &str| {
        let directory = group.path(directory);
        PoolDaemon::start(
            &directory,
            "127.0.0.1",
            &registrars,
            &group.tls_section(name),
        )
    };
    let elements = start("web", "web");
    let _element = elements.register("127.0.0.1:80");
    let users = start("app", "app");
    wait_until_resolved(&users, "the element");
    let before = refused_connections(&registrar);
    group.revoke("app");
    registrar.reload(&registrar.configuration());
    wait_for("the end of its connection", || {
        (refused_connections(&registrar) > before).then_some(())
    });
    wait_for("a user that is refused", || users.resolve().err());
    let new_user = start("app-again", "app");
    assert!(new_user.resolve().is_err());
    let status = registrar.status().expect("a registrar");
    assert_eq!(status.own_elements, 1, "connections of others stay open");

    // In the other direction, an element that learns of the revocation of its registrar's certificate leaves the
    // registrar.
    group.revoke("r1");
    elements.send_sighup();
    wait_for("an element that has left", || {
        (registrar.status()?.own_elements == 0).then_some(())
    });
}

/// Sends bytes on a new connection, and returns all received bytes until its end.
fn response_to(to: std::net::SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(to).expect("a connection");
    stream.set_read_timeout(Some(TIMEOUT)).expect("a limit");
    // The connection may have been ended already.
    let _ = stream.write_all(bytes);
    let mut received = Vec::new();
    match stream.read_to_end(&mut received) {
        Err(error) if error.kind() == ErrorKind::WouldBlock => panic!("the connection stays open"),
        _ => received,
    }
}

fn resolution_request() -> BytesMut {
    let message = Message::HandleResolution {
        updates: false,
        handle: PoolHandle::from("web"),
        items_max: None,
    };
    let mut bytes = BytesMut::new();
    message.encode(&mut bytes).expect("an encoding");
    bytes
}

#[test]
fn plain_tcp_is_refused_on_tls_port() {
    let group = TestGroup::new();
    let registrar = group.start_registrar("r1", "");
    let (tls, tcp) = (tls_address(&registrar), tcp_address(&registrar));
    let received = response_to(tls, &resolution_request());
    // At most a TLS alert, and nothing of ASAP.
    assert!(received.len() <= 7 && Message::parse(&received.into()).is_err());
    assert_eq!(refused_connections(&registrar), 1);
    // A connection without any data.
    assert!(response_to(tls, &[]).is_empty());
    assert_eq!(refused_connections(&registrar), 2);
    // TLS on a port for plain TCP.
    assert!(response_to(tcp, &[22, 3, 0, 2, 0, 1, 0]).is_empty());
    // A message beyond the length limit is refused at once, and an incomplete one after a short wait.
    assert!(response_to(tcp, &[5, 0, 255, 252]).is_empty());
    assert!(response_to(tcp, &resolution_request()[..6]).is_empty());
    let status = registrar.status().expect("a registrar");
    assert_eq!(status.counters.resolutions, 0);
}

#[test]
fn plain_tcp_client_is_authorised_by_address() {
    let group = TestGroup::new();
    let registrar = group.start_registrar("r1", "");
    let registrars = [format!("tcp://{}", tcp_address(&registrar))];
    let user = PoolDaemon::start(&group.path("user"), "127.0.0.1", &registrars, "");
    let error = resolution_error(&user);
    assert!(error.contains("rejected for security"), "{error}");
    let text = registrar.configuration();
    registrar.reload(&text.replace("127.0.0.7", "127.0.0.1"));
    wait_for("a user that is allowed", || {
        let error = resolution_error(&user);
        error.contains("there is no pool").then_some(())
    });
}

#[test]
fn honest_users_are_served_during_tcp_floods() {
    let group = TestGroup::new();
    let limits = "[limits]\nmessages_per_second = 2000\nmalformed = 4\nassociations_per_host = 30\nfirst_message_ms = 1500\n";
    let registrar = group.start_registrar("r1", limits);
    for name in ["web", "app"] {
        group.issue(name);
    }
    let registrars = [tls_url("r1", &registrar)];
    let start = |directory: &str, name: &str| {
        let directory = group.path(directory);
        PoolDaemon::start(
            &directory,
            "127.0.0.1",
            &registrars,
            &group.tls_section(name),
        )
    };
    let elements = start("web", "web");
    let _element = elements.register("127.0.0.1:80");
    let users = start("app", "app");
    wait_until_resolved(&users, "the element");
    flood::run_all_floods(&registrar, &users, &|| start("late", "app"));
}
