//! Registrars in separate processes, over SCTP inside UDP on loopback: elements, a user, synchronization, a death with
//! its takeover, and a return.

mod capture;
mod daemon;
mod element;
mod multicast;
mod stopped_peer;

use std::time::{Duration, Instant};

use daemon::Daemon;
use element::TestHost;
use holdfast_api::control::{ErrorBody, PoolDetail, PoolList, REGISTRAR_ROUTES, openapi};
use holdfast_sctp::AssocId;
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{ElementId, PoolHandle};

/// Longest wait for any condition that must become true.
const TIMEOUT: Duration = Duration::from_secs(180);

/// Runs the host until `poll` returns a value.
fn wait_for<T>(
    host: &mut TestHost,
    condition: &str,
    mut poll: impl FnMut(&mut TestHost) -> Option<T>,
) -> T {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        host.receive();
        if let Some(found) = poll(host) {
            return found;
        }
        assert!(Instant::now() < deadline, "exceeded time: {condition}");
    }
}

fn wait_until_ready(host: &mut TestHost, daemon: &Daemon) -> String {
    wait_for(host, "a registrar that serves", |_| {
        daemon
            .status()
            .filter(|status| status.ready)
            .map(|status| status.id)
    })
}

fn connect(host: &mut TestHost, daemon: &Daemon) -> AssocId {
    let assoc = host.connect(&daemon.status().expect("a registrar"));
    wait_for(host, "an association", |host| {
        host.is_up(assoc).then_some(assoc)
    })
}

fn register(host: &mut TestHost, assoc: AssocId, handle: &PoolHandle, id: ElementId) {
    host.register(assoc, handle, id);
    let answer = wait_for(host, "an answer to the registration", |host| {
        host.take_message(assoc, |message| {
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
fn resolve(host: &mut TestHost, assoc: AssocId, handle: &PoolHandle) -> Vec<ElementId> {
    host.resolve(assoc, handle);
    let answer = wait_for(host, "an answer to the resolution", |host| {
        host.take_message(assoc, |message| {
            matches!(message, Message::HandleResolutionResponse { .. })
        })
    });
    let Message::HandleResolutionResponse { elements, .. } = answer else {
        unreachable!("another kind of message");
    };
    let mut ids: Vec<_> = elements.iter().map(|element| element.id).collect();
    ids.sort_unstable();
    ids
}

/// Waits until `viewer` has this number of elements of `home`, with the checksum that `home` itself has.
fn wait_for_equal_checksums(host: &mut TestHost, home: &Daemon, viewer: &Daemon, elements: u64) {
    wait_for(host, "equal checksums", |_| {
        let own_status = home.status()?;
        let viewed = viewer.peer(&own_status.id)?;
        let equal = viewed.checksum == own_status.checksum
            && viewed.announced_checksum == Some(own_status.checksum);
        let has_all = own_status.own_elements == elements && viewed.elements == elements;
        (equal && has_all && viewed.active && viewed.connected).then_some(())
    });
}

/// Waits until the daemon reports this home for all elements of the pool.
fn wait_for_home(host: &mut TestHost, daemon: &Daemon, home_id: &str, elements: usize) {
    wait_for(host, "the elements' home", |_| {
        let pool = daemon.pool("echo")?;
        let homed = pool
            .elements
            .iter()
            .filter(|element| element.home == home_id);
        (homed.count() == elements && pool.elements.len() == elements).then_some(())
    });
}

#[test]
fn registrars_replicate_elements_and_survivor_takes_over() {
    let directory = tempfile::tempdir().expect("a directory");
    let in_directory = |name: &str| directory.path().join(name);
    let mut host = TestHost::open("127.0.0.1");
    let others = host.udp_port();
    let handle = PoolHandle::from("echo");
    let (one, two) = (ElementId(0x11), ElementId(0x22));

    let mut first = Daemon::start(&in_directory("first"), others, "");
    let first_id = wait_until_ready(&mut host, &first);
    let to_first = connect(&mut host, &first);
    register(&mut host, to_first, &handle, one);
    assert_eq!(resolve(&mut host, to_first, &handle), [one]);

    // The second registrar starts with the handlespace of the first.
    let second = Daemon::start(&in_directory("second"), others, &first.peer_configuration());
    let second_id = wait_until_ready(&mut host, &second);
    let to_second = connect(&mut host, &second);
    assert_eq!(resolve(&mut host, to_second, &handle), [one]);
    wait_for_equal_checksums(&mut host, &first, &second, 1);

    // Later registrations are synchronized.
    register(&mut host, to_first, &handle, two);
    wait_for_equal_checksums(&mut host, &first, &second, 2);
    wait_for_home(&mut host, &second, &first_id, 2);
    assert_eq!(resolve(&mut host, to_second, &handle), [one, two]);
    let three = ElementId(0x33);
    register(&mut host, to_second, &PoolHandle::from("other"), three);
    wait_for_equal_checksums(&mut host, &second, &first, 1);

    first.kill();
    wait_for_home(&mut host, &second, &second_id, 2);
    wait_for(&mut host, "elements that know their new home", |host| {
        let knows_new_home = |id: ElementId| {
            let of_second =
                |(element, home): &(ElementId, _)| *element == id && format!("{home}") == second_id;
            host.homes.iter().any(of_second)
        };
        (knows_new_home(one) && knows_new_home(two)).then_some(())
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
    let page = include_str!("../../../../docs/metrics.md");
    for line in metrics.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let name = help.split(' ').next().expect("a name");
            let ends = ['`', '{'].map(|end| format!("`{name}{end}"));
            let is_listed = ends.iter().any(|listed| page.contains(listed));
            assert!(is_listed, "docs/metrics.md lacks {name}");
        }
    }

    // A successor of the first registrar gets the handlespace from the second.
    let third = Daemon::start(&in_directory("first"), others, &second.peer_configuration());
    wait_until_ready(&mut host, &third);
    wait_for_equal_checksums(&mut host, &second, &third, 3);
    let to_third = connect(&mut host, &third);
    assert_eq!(resolve(&mut host, to_third, &handle), [one, two]);
}

#[test]
fn control_api_lists_pools_and_errors_name_remedy() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut host = TestHost::open("127.0.0.1");
    let mut daemon = Daemon::start(directory.path(), host.udp_port(), "");
    wait_until_ready(&mut host, &daemon);
    let at = connect(&mut host, &daemon);
    for name in ["c", "a", "b\\/\u{1}"] {
        register(&mut host, at, &PoolHandle::from(name), ElementId(7));
    }
    for route in REGISTRAR_ROUTES {
        let path = route.path.replace("{handle}", "b%5C%5C%2F%5Cx01");
        let (status, body) = daemon.get_raw(&path);
        assert_eq!(status, route.status, "{path}: {body}");
    }
    let (_, description) = daemon.get_raw("/openapi.json");
    let description: serde_json::Value = serde_json::from_str(&description).expect("JSON");
    assert_eq!(description, openapi(REGISTRAR_ROUTES));

    let (_, pool_json) = daemon.get_raw("/v1/pools/a");
    let pool: PoolDetail = serde_json::from_str(&pool_json).expect("a pool");
    assert_eq!((pool.total, pool.elements.len()), (1, 1));

    let (_, first) = daemon.get_raw("/v1/pools?limit=2");
    let first: PoolList = serde_json::from_str(&first).expect("a list");
    let handles = |list: &PoolList| -> Vec<String> {
        list.pools.iter().map(|pool| pool.handle.clone()).collect()
    };
    let next = first.next.as_ref().expect("more");
    let (_, rest_page) = daemon.get_raw(&format!("/v1/pools?limit=2&after={next}"));
    let rest_page: PoolList = serde_json::from_str(&rest_page).expect("a list");
    assert_eq!((rest_page.next.as_ref(), rest_page.total), (None, 3));
    assert_eq!((first.pools.len(), rest_page.pools.len()), (2, 1));
    let mut handles_of_pages = [handles(&first), handles(&rest_page)].concat();
    handles_of_pages.sort();
    assert_eq!(handles_of_pages, ["a", "b\\\\/\\x01", "c"]);

    for (path, status) in [
        ("/v1/nothing", 404),
        ("/v1/pools/none", 404),
        ("/v1/pools/%5Cq", 404),
        ("/v1/pools?limit=many", 400),
        ("/v1/pools?after=%5Cq", 400),
    ] {
        let (actual_status, body) = daemon.get_raw(path);
        assert_eq!(actual_status, status, "{path}: {body}");
        let body: ErrorBody = serde_json::from_str(&body).expect("an error");
        assert!(!body.what_to_do.is_empty(), "{path}");
    }
    assert!(daemon.stop());
    // The registrar announces its end by a shutdown of its associations.
    wait_for(&mut host, "the end of the association", |host| {
        (!host.is_up(at)).then_some(())
    });
}

#[test]
fn registrar_serves_ipv6() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut host = TestHost::open("::1");
    let text = format!(
        "[registrar]\nlisten = [\"::1\"]\nasap_port = 0\nenrp_port = 0\nraw = false\n\
         encapsulation_port = 0\nrun_dir = \"{}\"\n[access]\nregister = [\"::1\"]\n",
        directory.path().display()
    );
    let daemon = Daemon::start_configured(directory.path(), &text);
    wait_until_ready(&mut host, &daemon);
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
fn registration_is_granted(
    host: &mut TestHost,
    assoc: AssocId,
    handle: &PoolHandle,
    id: ElementId,
) -> bool {
    host.register(assoc, handle, id);
    let answer = wait_for(host, "an answer to the registration", |host| {
        host.take_message(assoc, |message| {
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
fn reload_applies_changed_access_list() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut host = TestHost::open("127.0.0.1");
    let daemon = Daemon::start(directory.path(), host.udp_port(), "");
    wait_until_ready(&mut host, &daemon);
    let at = connect(&mut host, &daemon);
    let (handle, id) = (PoolHandle::from("echo"), ElementId(1));
    register(&mut host, at, &handle, id);
    let text = daemon.configuration();
    let with_access_section =
        |list: &str| text.replace("[access]\n", &format!("[access]\n{list}\n"));

    daemon.reload(&with_access_section("register = [\"10.0.0.0/8\"]"));
    wait_for(&mut host, "the element's removal", |_| {
        daemon.status().filter(|status| status.elements == 0)
    });
    assert!(!registration_is_granted(&mut host, at, &handle, id));
    let refused = daemon.status().expect("a registrar").counters;
    assert_eq!((refused.access_denied, refused.refusals), (1, 1));

    // A configuration with an error changes nothing.
    daemon.reload(&with_access_section("register = [\"127.0.0.1/99\"]"));
    assert!(!registration_is_granted(&mut host, at, &handle, id));
    daemon.reload(&with_access_section("register = [\"127.0.0.1\"]"));
    wait_for(&mut host, "permission", |host| {
        registration_is_granted(host, at, &handle, id).then_some(())
    });
    assert_eq!(resolve(&mut host, at, &handle), [id]);
}
