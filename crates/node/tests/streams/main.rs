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
use group::{Group, Pool, tcp_of, tls_of};
use holdfast_api::pool::ElementEvent;
use holdfast_wire::rserpool::PoolHandle;
use holdfast_wire::rserpool::asap::Message;

/// Longest wait for any condition that must become true.
const PATIENCE: Duration = Duration::from_secs(180);

fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "exceeded time: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Returns `tls://NAME@ADDRESS` of a registrar.
fn named(name: &str, registrar: &Registrar) -> String {
    format!("tls://{name}@{}", tls_of(registrar))
}

fn refused(registrar: &Registrar) -> u64 {
    let status = registrar.status().expect("a registrar");
    status.counters.connections_refused
}

fn is_resolved(user: &Pool, what: &str) {
    until(what, || {
        let found = user.resolve().ok()?;
        (found.elements.len() == 1).then_some(())
    });
}

/// Returns the error of a user's resolution.
fn trouble(user: &Pool) -> String {
    user.resolve().expect_err("no answer").to_string()
}

#[test]
fn an_element_registers_and_a_user_resolves_over_tls_and_goes_on_at_another_registrar() {
    let group = Group::new();
    let mut first = group.registrar("r1", "");
    let second = group.registrar("r2", &first.as_peer());
    for name in ["web", "app"] {
        group.issue(name);
    }
    let both = [named("r1", &first), named("r2", &second)];
    let pool = |name: &str, registrars: &[String]| {
        let directory = group.path(name);
        Pool::start(&directory, "127.0.0.1", registrars, &group.tls(name))
    };
    // The element registers at the first registrar.
    let elements = pool("web", &both);
    let element = elements.register("127.0.0.1:80");
    let users = pool("app", &both);
    is_resolved(&users, "the element");
    for registrar in [&first, &second] {
        until("the element at each registrar", || registrar.pool("web"));
    }

    // A host without the right to register is told so.
    let strange = users.register("127.0.0.1:81");
    let said = until("a refusal", || match strange.next().expect("a channel") {
        Some(ElementEvent::Refused { reason }) => Some(reason),
        _ => None,
    });
    assert!(said.contains("rejected for security"), "{said}");

    let home = first.status().expect("a registrar").own_elements == 1;
    let mut second = second;
    let (dead, left) = match home {
        true => (&mut first, &second),
        false => (&mut second, &first),
    };
    dead.kill();
    until("a new home", || {
        let status = left.status()?;
        (status.own_elements == 1).then_some(())
    });
    is_resolved(&users, "the element at the other registrar");
    // Without keep-alives over TLS the element would be removed soon.
    let asked = |registrar: &Registrar| registrar.status().expect("one").counters.keep_alives;
    let before = asked(left);
    until("keep-alives", || (asked(left) > before + 5).then_some(()));
    assert_eq!(left.pool("web").expect("a pool").elements.len(), 1);
    drop(element);
    until("its end", || left.pool("web").is_none().then_some(()));
}

#[test]
fn wrong_certificates_are_refused_at_either_end() {
    let group = Group::new();
    let registrar = group.registrar("r1", "");
    let foreign = Group::new();
    for (name, authority) in [("app", &group), ("app", &foreign)] {
        authority.issue(name);
    }
    let user = |directory: &str, registrars: &[String], tls: &str| {
        Pool::start(&group.path(directory), "127.0.0.1", registrars, tls)
    };
    let right = named("r1", &registrar);

    // A user with another authority: the user does not trust the registrar.
    let stranger = user("foreign", std::slice::from_ref(&right), &foreign.tls("app"));
    assert!(trouble(&stranger).contains("no registrar"));
    // The user trusts the registrar, but the registrar does not trust the user's certificate.
    let mixed = foreign.tls("app").replace(
        &foreign.path("ca/ca.pem").display().to_string(),
        &group.path("ca/ca.pem").display().to_string(),
    );
    let mixed = mixed.replace(
        &foreign.path("ca/ca.crl").display().to_string(),
        &group.path("ca/ca.crl").display().to_string(),
    );
    let before = refused(&registrar);
    let impostor = user("impostor", std::slice::from_ref(&right), &mixed);
    assert!(impostor.resolve().is_err());
    assert!(refused(&registrar) > before);

    // A member of the group, but not the registrar that the user named.
    let wrong = named("r2", &registrar);
    let misled = user("misled", &[wrong], &group.tls("app"));
    assert!(trouble(&misled).contains("no registrar"));
    // A user that names no registrar accepts any member.
    let any = format!("tls://{}", tls_of(&registrar));
    let easy = user("easy", &[any], &group.tls("app"));
    assert!(trouble(&easy).contains("there is no pool"));
    let good = user("good", &[right], &group.tls("app"));
    assert!(trouble(&good).contains("there is no pool"));
}

#[test]
fn a_revoked_certificate_is_refused_and_ends_what_it_had() {
    let group = Group::new();
    let registrar = group.registrar("r1", "");
    for name in ["web", "app"] {
        group.issue(name);
    }
    let registrars = [named("r1", &registrar)];
    let start = |directory: &str, name: &str| {
        let directory = group.path(directory);
        Pool::start(&directory, "127.0.0.1", &registrars, &group.tls(name))
    };
    let elements = start("web", "web");
    let _element = elements.register("127.0.0.1:80");
    let users = start("app", "app");
    is_resolved(&users, "the element");
    let before = refused(&registrar);
    group.revoke("app");
    registrar.reload(&registrar.configuration());
    until("the end of its connection", || {
        (refused(&registrar) > before).then_some(())
    });
    until("a user that is refused", || users.resolve().err());
    let again = start("app-again", "app");
    assert!(again.resolve().is_err());
    let home = registrar.status().expect("a registrar");
    assert_eq!(home.own_elements, 1, "others' connections go on");

    // In the other direction, an element that learns of the revocation of its registrar's certificate leaves the
    // registrar.
    group.revoke("r1");
    elements.hang_up();
    until("an element that has left", || {
        (registrar.status()?.own_elements == 0).then_some(())
    });
}

/// Sends bytes on a new connection, and returns all received bytes until its end.
fn answer(to: std::net::SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(to).expect("a connection");
    stream.set_read_timeout(Some(PATIENCE)).expect("a limit");
    // The connection may have been ended already.
    let _ = stream.write_all(bytes);
    let mut came = Vec::new();
    match stream.read_to_end(&mut came) {
        Err(error) if error.kind() == ErrorKind::WouldBlock => panic!("it goes on"),
        _ => came,
    }
}

fn resolution() -> BytesMut {
    let message = Message::HandleResolution {
        updates: false,
        handle: PoolHandle::from("web"),
        items: None,
    };
    let mut bytes = BytesMut::new();
    message.encode(&mut bytes).expect("an encoding");
    bytes
}

#[test]
fn what_is_no_tls_is_refused_where_tls_is_spoken() {
    let group = Group::new();
    let registrar = group.registrar("r1", "");
    let (tls, tcp) = (tls_of(&registrar), tcp_of(&registrar));
    let came = answer(tls, &resolution());
    // At most a TLS alert, and nothing of ASAP.
    assert!(came.len() <= 7 && Message::parse(&came.into()).is_err());
    assert_eq!(refused(&registrar), 1);
    // A connection without any data.
    assert!(answer(tls, &[]).is_empty());
    assert_eq!(refused(&registrar), 2);
    // TLS on a port for plain TCP.
    assert!(answer(tcp, &[22, 3, 0, 2, 0, 1, 0]).is_empty());
    // A message beyond the length limit is refused at once, and an incomplete one after a short wait.
    assert!(answer(tcp, &[5, 0, 255, 252]).is_empty());
    assert!(answer(tcp, &resolution()[..6]).is_empty());
    let status = registrar.status().expect("a registrar");
    assert_eq!(status.counters.resolutions, 0);
}

#[test]
fn tcp_alone_goes_by_addresses() {
    let group = Group::new();
    let registrar = group.registrar("r1", "");
    let registrars = [format!("tcp://{}", tcp_of(&registrar))];
    let user = Pool::start(&group.path("user"), "127.0.0.1", &registrars, "");
    let said = trouble(&user);
    assert!(said.contains("rejected for security"), "{said}");
    let text = registrar.configuration();
    registrar.reload(&text.replace("127.0.0.7", "127.0.0.1"));
    until("a user that is allowed", || {
        let said = trouble(&user);
        said.contains("there is no pool").then_some(())
    });
}

#[test]
fn floods_over_tcp_leave_honest_users_served() {
    let group = Group::new();
    let limits = "[limits]\nmessages_per_second = 2000\nmalformed = 4\nassociations_per_host = 30\nfirst_message_ms = 1500\n";
    let registrar = group.registrar("r1", limits);
    for name in ["web", "app"] {
        group.issue(name);
    }
    let registrars = [named("r1", &registrar)];
    let start = |directory: &str, name: &str| {
        let directory = group.path(directory);
        Pool::start(&directory, "127.0.0.1", &registrars, &group.tls(name))
    };
    let elements = start("web", "web");
    let _element = elements.register("127.0.0.1:80");
    let users = start("app", "app");
    is_resolved(&users, "the element");
    flood::all(&registrar, &users, &|| start("late", "app"));
}
