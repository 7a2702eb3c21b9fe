//! Registrars in processes of their own, over SCTP inside UDP on loopback: elements, a user, synchronisation, a death with its
//! takeover, a return.

mod daemon;
mod element;

use std::time::{Duration, Instant};

use daemon::Daemon;
use element::Host;
use holdfast_sys::transport::AssocId;
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{ElementId, PoolHandle};

/// Longest wait for anything that must happen.
const PATIENCE: Duration = Duration::from_secs(180);

/// Lets the host live until `look` finds something.
fn until<T>(host: &mut Host, what: &str, mut look: impl FnMut(&mut Host) -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        host.turn();
        if let Some(found) = look(host) {
            return found;
        }
        assert!(Instant::now() < deadline, "in vain: {what}");
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

/// The elements that a resolution brings, in order of their numbers.
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

/// Waits until `viewer` has so many elements of `home`, with the checksum that `home` itself has.
fn in_step(host: &mut Host, home: &Daemon, viewer: &Daemon, elements: u64) {
    until(host, "equal checksums", |_| {
        let own = home.status()?;
        let seen = viewer.peer(&own.id)?;
        let equal = seen.checksum == own.checksum && seen.announced_checksum == Some(own.checksum);
        let all = own.own_elements == elements && seen.elements == elements;
        (equal && all && seen.active && seen.connected).then_some(())
    });
}

/// Waits until the daemon says that all elements of the pool have this home.
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
    let mut host = Host::open();
    let others = host.udp_port();
    let handle = PoolHandle::from("echo");
    let (one, two) = (ElementId(0x11), ElementId(0x22));

    let mut first = Daemon::start(&in_directory("first"), others, "");
    let first_id = ready(&mut host, &first);
    let to_first = connect(&mut host, &first);
    register(&mut host, to_first, &handle, one);
    assert_eq!(resolve(&mut host, to_first, &handle), [one]);

    // The second begins with what the first one has.
    let second = Daemon::start(&in_directory("second"), others, &first.as_peer());
    let second_id = ready(&mut host, &second);
    let to_second = connect(&mut host, &second);
    assert_eq!(resolve(&mut host, to_second, &handle), [one]);
    in_step(&mut host, &first, &second, 1);

    // What registers later is told.
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
    assert!(
        metrics.contains("holdfast_registrar_takeovers_total 1\n"),
        "{metrics}"
    );
    assert!(
        metrics.contains("holdfast_registrar_elements_own 3\n"),
        "{metrics}"
    );

    // A successor of the first learns all from the second.
    let third = Daemon::start(&in_directory("first"), others, &second.as_peer());
    ready(&mut host, &third);
    in_step(&mut host, &second, &third, 3);
    let to_third = connect(&mut host, &third);
    assert_eq!(resolve(&mut host, to_third, &handle), [one, two]);
}
