//! Registrars in separate processes, over SCTP inside UDP on loopback: elements, a user, synchronization, a death with
//! its takeover, and a return.

mod capture;
mod daemon;
mod element;
mod multicast;
mod stuck;

use std::time::{Duration, Instant};

use daemon::Daemon;
use element::Host;
use holdfast_api::control::{ErrorBody, PoolDetail, PoolList, REGISTRAR_ROUTES, openapi};
use holdfast_sys::transport::AssocId;
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{ElementId, PoolHandle};

/// Longest wait for any condition that must become true.
const PATIENCE: Duration = Duration::from_secs(180);

/// Runs the host until `look` returns a value.
fn until<T>(host: &mut Host, what: &str, mut look: impl FnMut(&mut Host) -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        host.turn();
        if let Some(found) = look(host) {
            return found;
        }
        assert!(Instant::now() < deadline, "exceeded time: {what}");
    }
}

fn ready(host: &mut Host, daemon: &Daemon) -> String {
    until(host, "a registrar that serves", |_| {
        daemon
            .status()
            .filter(|status| status.ready)
            .map(|status| status.id)
    })
}

fn connect(host: &mut Host, daemon: &Daemon) -> AssocId {
    let assoc = host.connect(&daemon.status().expect("a registrar"));
    until(host, "an association", |host| {
        host.is_up(assoc).then_some(assoc)
    })
}

fn register(host: &mut Host, at: AssocId, handle: &PoolHandle, id: ElementId) {
    host.register(at, handle, id);
    let answer = until(host, "an answer to the registration", |host| {
        host.take(at, |message| {
            matches!(message, Message::RegistrationResponse { .. })
        })
    });
    let causes = Vec::new();
    let wanted = Message::RegistrationResponse {
        rejected: false,
        handle: handle.clone(),
        id,
        causes,
    };
    assert_eq!(answer, wanted);
}

/// Resolves a pool; returns the element IDs in ascending order.
fn resolve(host: &mut Host, at: AssocId, handle: &PoolHandle) -> Vec<ElementId> {
    host.resolve(at, handle);
    let answer = until(host, "an answer to the resolution", |host| {
        host.take(at, |message| {
            matches!(message, Message::HandleResolutionResponse { .. })
        })
    });
    let Message::HandleResolutionResponse { elements, .. } = answer else {
        unreachable!("taken as one");
    };
    let mut ids: Vec<_> = elements.iter().map(|element| element.id).collect();
    ids.sort_unstable();
    ids
}

/// Waits until `viewer` has this number of elements of `home`, with the checksum that `home` itself has.
fn in_step(host: &mut Host, home: &Daemon, viewer: &Daemon, elements: u64) {
    until(host, "equal checksums", |_| {
        let own = home.status()?;
        let seen = viewer.peer(&own.id)?;
        let equal = seen.checksum == own.checksum && seen.announced_checksum == Some(own.checksum);
        let all = own.own_elements == elements && seen.elements == elements;
        (equal && all && seen.active && seen.connected).then_some(())
    });
}

/// Waits until the daemon reports this home for all elements of the pool.
fn at_home(host: &mut Host, daemon: &Daemon, home: &str, elements: usize) {
    until(host, "the elements' home", |_| {
        let pool = daemon.pool("echo")?;
        let theirs = pool.elements.iter().filter(|element| element.home == home);
        (theirs.count() == elements && pool.elements.len() == elements).then_some(())
    });
}

#[test]
fn registrars_share_their_elements_and_one_takes_over_the_other() {
    let directory = tempfile::tempdir().expect("a directory");
    let in_directory = |name: &str| directory.path().join(name);
    let mut host = Host::open("127.0.0.1");
    let others = host.udp_port();
    let handle = PoolHandle::from("echo");
    let (one, two) = (ElementId(0x11), ElementId(0x22));

    let mut first = Daemon::start(&in_directory("first"), others, "");
    let first_id = ready(&mut host, &first);
    let to_first = connect(&mut host, &first);
    register(&mut host, to_first, &handle, one);
    assert_eq!(resolve(&mut host, to_first, &handle), [one]);

    // The second registrar starts with the handlespace of the first.
    let second = Daemon::start(&in_directory("second"), others, &first.as_peer());
    let second_id = ready(&mut host, &second);
    let to_second = connect(&mut host, &second);
    assert_eq!(resolve(&mut host, to_second, &handle), [one]);
    in_step(&mut host, &first, &second, 1);

    // Later registrations are synchronized.
    register(&mut host, to_first, &handle, two);
    in_step(&mut host, &first, &second, 2);
    at_home(&mut host, &second, &first_id, 2);
    assert_eq!(resolve(&mut host, to_second, &handle), [one, two]);
    let three = ElementId(0x33);
    register(&mut host, to_second, &PoolHandle::from("other"), three);
    in_step(&mut host, &second, &first, 1);

    first.kill();
    at_home(&mut host, &second, &second_id, 2);
    until(&mut host, "elements that know their new home", |host| {
        let told = |id: ElementId| {
            let of_second =
                |(element, home): &(ElementId, _)| *element == id && format!("{home}") == second_id;
            host.homes.iter().any(of_second)
        };
        (told(one) && told(two)).then_some(())
    });
    assert_eq!(resolve(&mut host, to_second, &handle), [one, two]);
    let metrics = second.metrics().expect("metrics");
    let takeovers = metrics
        .lines()
        .find_map(|line| line.strip_prefix("holdfast_registrar_takeovers_total "));
    assert!(takeovers.is_some_and(|count| count != "0"), "{metrics}");
    assert!(
        metrics.contains("holdfast_registrar_elements_own 3\n"),
        "{metrics}"
    );

    // A successor of the first registrar gets the handlespace from the second.
    let third = Daemon::start(&in_directory("first"), others, &second.as_peer());
    ready(&mut host, &third);
    in_step(&mut host, &second, &third, 3);
    let to_third = connect(&mut host, &third);
    assert_eq!(resolve(&mut host, to_third, &handle), [one, two]);
}

#[test]
fn operators_see_pools_and_are_told_what_to_do() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut host = Host::open("127.0.0.1");
    let mut daemon = Daemon::start(directory.path(), host.udp_port(), "");
    ready(&mut host, &daemon);
    let at = connect(&mut host, &daemon);
    for name in ["c", "a", "b\\/\u{1}"] {
        register(&mut host, at, &PoolHandle::from(name), ElementId(7));
    }
    for route in REGISTRAR_ROUTES {
        let path = route.path.replace("{handle}", "b%5C%5C%2F%5Cx01");
        let (status, body) = daemon.raw(&path);
        assert_eq!(status, route.status, "{path}: {body}");
    }
    let (_, description) = daemon.raw("/openapi.json");
    let description: serde_json::Value = serde_json::from_str(&description).expect("JSON");
    assert_eq!(description, openapi(REGISTRAR_ROUTES));

    let (_, one) = daemon.raw("/v1/pools/a");
    let one: PoolDetail = serde_json::from_str(&one).expect("a pool");
    assert_eq!((one.total, one.elements.len()), (1, 1));

    let (_, first) = daemon.raw("/v1/pools?limit=2");
    let first: PoolList = serde_json::from_str(&first).expect("a list");
    let handles = |list: &PoolList| -> Vec<String> {
        list.pools.iter().map(|pool| pool.handle.clone()).collect()
    };
    let next = first.next.as_ref().expect("more");
    let (_, rest) = daemon.raw(&format!("/v1/pools?limit=2&after={next}"));
    let rest: PoolList = serde_json::from_str(&rest).expect("a list");
    assert_eq!((rest.next.as_ref(), rest.total), (None, 3));
    assert_eq!((first.pools.len(), rest.pools.len()), (2, 1));
    let mut all = [handles(&first), handles(&rest)].concat();
    all.sort();
    assert_eq!(all, ["a", "b\\\\/\\x01", "c"]);

    for (path, status) in [
        ("/v1/nothing", 404),
        ("/v1/pools/none", 404),
        ("/v1/pools/%5Cq", 404),
        ("/v1/pools?limit=many", 400),
        ("/v1/pools?after=%5Cq", 400),
    ] {
        let (got, body) = daemon.raw(path);
        assert_eq!(got, status, "{path}: {body}");
        let body: ErrorBody = serde_json::from_str(&body).expect("an error");
        assert!(!body.what_to_do.is_empty(), "{path}");
    }
    assert!(daemon.stop());
    // The registrar announces its end by a shutdown of its associations.
    until(&mut host, "the end of the association", |host| {
        (!host.is_up(at)).then_some(())
    });
}

#[test]
fn ipv6_is_served_too() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut host = Host::open("::1");
    let text = format!(
        "[registrar]\nlisten = [\"::1\"]\nasap_port = 0\nenrp_port = 0\nraw = false\n\
         encapsulation_port = 0\nrun_dir = \"{}\"\n[access]\nregister = [\"::1\"]\n",
        directory.path().display()
    );
    let daemon = Daemon::configured(directory.path(), &text);
    ready(&mut host, &daemon);
    let at = connect(&mut host, &daemon);
    let (handle, id) = (PoolHandle::from("echo"), ElementId(1));
    register(&mut host, at, &handle, id);
    assert_eq!(resolve(&mut host, at, &handle), [id]);
    let pool = daemon.pool("echo").expect("a pool");
    let element = &pool.elements[0];
    assert_eq!(element.addresses, ["[::1]:80".parse().expect("an address")]);
    assert!(element.registrar_addresses[0].is_ipv6());
}

/// Registers an element, and returns true if the registration is granted.
fn is_granted(host: &mut Host, at: AssocId, handle: &PoolHandle, id: ElementId) -> bool {
    host.register(at, handle, id);
    let answer = until(host, "an answer to the registration", |host| {
        host.take(at, |message| {
            matches!(message, Message::RegistrationResponse { .. })
        })
    });
    matches!(
        answer,
        Message::RegistrationResponse {
            rejected: false,
            ..
        }
    )
}

#[test]
fn operators_change_who_may_register_while_it_runs() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut host = Host::open("127.0.0.1");
    let daemon = Daemon::start(directory.path(), host.udp_port(), "");
    ready(&mut host, &daemon);
    let at = connect(&mut host, &daemon);
    let (handle, id) = (PoolHandle::from("echo"), ElementId(1));
    register(&mut host, at, &handle, id);
    let text = daemon.configuration();
    let with_access = |list: &str| text.replace("[access]\n", &format!("[access]\n{list}\n"));

    daemon.reload(&with_access("register = [\"10.0.0.0/8\"]"));
    until(&mut host, "the element's removal", |_| {
        daemon.status().filter(|status| status.elements == 0)
    });
    assert!(!is_granted(&mut host, at, &handle, id));
    let refused = daemon.status().expect("a registrar").counters;
    assert_eq!((refused.denied, refused.refusals), (1, 1));

    // A configuration with an error changes nothing.
    daemon.reload(&with_access("register = [\"127.0.0.1/99\"]"));
    assert!(!is_granted(&mut host, at, &handle, id));
    daemon.reload(&with_access("register = [\"127.0.0.1\"]"));
    until(&mut host, "permission", |host| {
        is_granted(host, at, &handle, id).then_some(())
    });
    assert_eq!(resolve(&mut host, at, &handle), [id]);
}
