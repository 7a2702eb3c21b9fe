//! Whole descriptor tables: shared and large ones, pidfds, and sockets that are passed through.

use crate::harness::{Donor, at, fork, put, read, stop};
use holdfast_sys::process::files::image::{FileId, Kind};
use holdfast_sys::process::files::{Draft, Given, Limits, Stock};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{Mode, OFlags, open};
use std::collections::BTreeMap;
use std::fs::File;
use std::net::{TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

#[test]
fn processes_that_share_a_table_have_one() {
    let donor = Donor::new(|| {
        put(File::open("/dev/zero").expect("open"), 10);
        // SAFETY: as `fork`, with the descriptor table shared.
        let child = unsafe {
            let flags = libc::CLONE_FILES | libc::SIGCHLD;
            libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0)
        };
        if child == 0 {
            put(File::open("/dev/null").expect("open"), 11);
            stop();
        }
        let child = rustix::process::Pid::from_raw(child as i32);
        let stopped = rustix::process::WaitOptions::UNTRACED;
        rustix::process::waitpid(child, stopped).expect("waited");
        if fork().is_none() {
            put(File::open("/dev/full").expect("open"), 12);
            stop();
        }
        stop();
    });
    // The second child stops only after it has opened its file.
    let pids = donor.pids();
    assert_eq!(pids.len(), 3);
    let deadline = Instant::now() + Duration::from_secs(60);
    let status = format!("/proc/{}/status", pids[2]);
    while !std::fs::read_to_string(&status).is_ok_and(|text| text.contains("State:\tT")) {
        assert!(
            Instant::now() < deadline,
            "exceeded time: the child does not stop"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    let saved = donor.save();
    let tables: Vec<_> = saved.frozen.tables.values().collect();
    assert_eq!(tables.len(), 2);
    assert_eq!(tables[0].pids, pids[..2].iter().copied().collect());
    assert_eq!(tables[1].pids, [pids[2]].into());
    saved.restored(|table| {
        assert_eq!(read(10)[..4], [0; 4]);
        assert!(rustix::io::fcntl_getfd(at(11)).is_ok());
        assert_eq!(rustix::io::fcntl_getfd(at(12)).is_ok(), table == 1);
    });
}

#[test]
fn thousands_of_descriptors_move_within_the_limit() {
    let many = 4_000;
    let donor = Donor::new(|| {
        for number in 0..many {
            put(
                eventfd(number as u32, EventfdFlags::NONBLOCK).expect("made"),
                3 + number,
            );
        }
        stop();
    });
    donor.save().restored(|_| {
        for number in 0..many as u64 {
            let expected = if number == 0 { 0 } else { number };
            let mut count = [0; 8];
            let outcome = rustix::io::read(at(3 + number as i32), &mut count);
            assert_eq!(outcome.is_ok(), number > 0);
            assert_eq!(u64::from_ne_bytes(count), expected);
        }
    });
}

#[test]
fn one_file_opened_many_times_is_told_apart() {
    let donor = Donor::new(|| {
        for number in (10..500).step_by(2) {
            put(File::open("/dev/null").expect("open"), number);
            put(rustix::io::dup(at(number)).expect("dup"), 1001 - number);
        }
        stop();
    });
    let saved = donor.save();
    let table = saved.frozen.tables.values().next().expect("a table");
    let mut seen = std::collections::BTreeSet::new();
    for number in (10..500).step_by(2) {
        assert_eq!(
            table.slots[&number].file,
            table.slots[&(1001 - number)].file
        );
        assert!(seen.insert(table.slots[&number].file));
    }
    // One more open file stands at 0, 1 and 2: input, output and errors.
    assert_eq!(saved.frozen.files.len(), 245 + 1);
}

#[test]
fn a_pidfd_stands_for_the_process_of_the_tree() {
    let donor = Donor::new(|| {
        let own = rustix::process::getpid();
        let flags = rustix::process::PidfdFlags::empty();
        put(rustix::process::pidfd_open(own, flags).expect("made"), 10);
        put(
            open("/dev/null", OFlags::PATH, Mode::empty()).expect("open"),
            11,
        );
        stop();
    });
    let pid = donor.pids()[0];
    donor.save().restored(|_| {
        let info = std::fs::read_to_string("/proc/self/fdinfo/10").expect("read");
        assert!(info.contains(&format!("Pid:\t{pid}\n")), "{info}");
        assert_eq!(
            rustix::io::read(at(11), &mut [0; 1]),
            Err(rustix::io::Errno::BADF)
        );
    });
}

#[test]
fn sockets_of_the_internet_are_handed_through() {
    let donor = Donor::new(|| {
        put(TcpListener::bind("127.0.0.1:0").expect("bound"), 10);
        put(UdpSocket::bind("[::1]:0").expect("bound"), 11);
        let set = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::empty());
        put(set.expect("made"), 12);
        let data = rustix::event::epoll::EventData::new_u64(9);
        rustix::event::epoll::add(at(12), at(10), data, rustix::event::epoll::EventFlags::IN)
            .expect("added");
        stop();
    });
    let draft = donor.draft();
    let frozen = draft.save_frozen(&donor.pids()).expect("saved");
    assert_eq!(frozen.sockets.len(), 2);
    let mut image = draft.image.clone();
    (image.apply(frozen.changes.clone())).expect("an image");
    let kinds: Vec<_> = frozen
        .sockets
        .keys()
        .map(|id| &image.files[id].kind)
        .collect();
    let protocols: Vec<_> = kinds
        .iter()
        .map(|kind| match kind {
            Kind::Inet {
                family, protocol, ..
            } => (*family, *protocol),
            other => panic!("{other:?}"),
        })
        .collect();
    assert!(
        protocols.contains(&(libc::AF_INET, libc::IPPROTO_TCP)),
        "{protocols:?}"
    );
    assert!(
        protocols.contains(&(libc::AF_INET6, libc::IPPROTO_UDP)),
        "{protocols:?}"
    );
    // Copies of the donor's sockets take the place of sockets that the acceptor makes; the descriptor numbers
    // show where each was put.
    let listener = frozen.sockets.iter().find(|(id, _)| {
        matches!(
            image.files[id].kind,
            Kind::Inet {
                protocol: libc::IPPROTO_TCP,
                ..
            }
        )
    });
    let listener = *listener.expect("a listener").0;
    assert_eq!(
        draft.image.tables.values().next().expect("a table").slots[&10].file,
        listener
    );
    let restored = restored_with(draft.image, frozen.changes, frozen.sockets);
    assert_eq!(restored, "");
}

/// Restores the image with these sockets in a separate process.
fn restored_with(
    image: holdfast_sys::process::files::Image,
    changes: holdfast_sys::process::files::Changes,
    sockets: BTreeMap<FileId, OwnedFd>,
) -> String {
    let _alone = crate::harness::lifting();
    Stock::raise_limit().expect("limit");
    let lifted: BTreeMap<FileId, OwnedFd> = sockets
        .into_iter()
        .map(|(id, fd)| (id, Stock::lift_own(fd).expect("lifted")))
        .collect();
    crate::harness::in_child(|| {
        let mut stock = Stock::prepare(image, Given::default()).expect("prepared");
        let absent = stock.arrangement(0).expect("nothing to do for no table");
        assert_eq!(absent.len(), 1);
        let sockets = lifted
            .iter()
            .map(|(id, fd)| (*id, OwnedFd::try_clone(fd).expect("dup")));
        let given = Given {
            sockets: sockets.collect(),
            ..Given::default()
        };
        stock.finish(changes, given).expect("finished");
        let table = *stock.image().tables.keys().next().expect("a table");
        stock.arrange(table).expect("arranged");
        let listener = TcpListener::from(at(10).try_clone_to_owned().expect("dup"));
        let address = listener.local_addr().expect("address");
        let _client = std::net::TcpStream::connect(address).expect("connected");
        let mut events = Vec::with_capacity(4);
        let space = rustix::buffer::spare_capacity(&mut events);
        rustix::event::epoll::wait(at(12), space, None).expect("wait");
        assert_eq!({ events[0].data }.u64(), 9);
        assert!(
            UdpSocket::from(at(11).try_clone_to_owned().expect("dup"))
                .local_addr()
                .is_ok()
        );
    })
}

#[test]
fn sockets_that_are_in_each_others_places_change_them() {
    let many = 20;
    let donor = Donor::new(|| {
        for number in 0..many {
            put(UdpSocket::bind("127.0.0.1:0").expect("bound"), 10 + number);
        }
        stop();
    });
    let draft = donor.draft();
    let said = crate::harness::in_child(|| {
        let table = draft.image.tables.values().next().expect("a table");
        let mut given = Given::default();
        let mut expected = Vec::new();
        // Each socket occupies the number that belongs to the third socket after it.
        for number in 0..many {
            let place = 10 + (number + 3) % many;
            put(UdpSocket::bind("127.0.0.1:0").expect("bound"), place);
            expected.push(rustix::net::getsockname(at(place)).expect("name"));
            // SAFETY: the number is given up to the stock here.
            let fd = unsafe { std::os::fd::FromRawFd::from_raw_fd(place) };
            given
                .sockets
                .insert(table.slots[&(10 + number as u32)].file, fd);
        }
        let stock = Stock::prepare(draft.image.clone(), given).expect("prepared");
        stock
            .arrange(*draft.image.tables.keys().next().expect("a table"))
            .expect("arranged");
        for (number, expected) in expected.iter().enumerate() {
            let name = rustix::net::getsockname(at(10 + number as i32)).expect("name");
            assert_eq!(name, *expected);
        }
    });
    assert_eq!(said, "");
}

#[test]
fn memory_that_moves_with_its_mappings_is_handed_in() {
    let donor = Donor::new(|| {
        let memory =
            rustix::fs::memfd_create("mapped", rustix::fs::MemfdFlags::CLOEXEC).expect("made");
        rustix::io::write(&memory, b"donor's").expect("written");
        put(memory, 10);
        stop();
    });
    let stat = rustix::fs::stat(format!("/proc/{}/fd/10", donor.pids()[0])).expect("stat");
    let limits = Limits {
        elsewhere: [(stat.st_dev, stat.st_ino)].into(),
        ..Limits::default()
    };
    let draft = Draft::save(&donor.pids(), &limits).expect("saved");
    let frozen = draft.save_frozen(&donor.pids()).expect("saved");
    let content = draft.image.contents.values().next().expect("content");
    assert_eq!(content.elsewhere, Some((stat.st_dev, stat.st_ino)));
    assert!(content.chunks.is_empty());
    let changes = frozen.changes;
    let said = crate::harness::in_child(|| {
        let absent = Stock::prepare(draft.image.clone(), Given::default());
        let absent = absent.expect_err("refused").to_string();
        assert!(absent.contains("was not restored"), "{absent}");
        let memory =
            rustix::fs::memfd_create("mapped", rustix::fs::MemfdFlags::CLOEXEC).expect("made");
        rustix::io::write(&memory, b"restorer's").expect("written");
        let given = Given {
            memory: [((stat.st_dev, stat.st_ino), memory)].into(),
            ..Given::default()
        };
        let mut stock = Stock::prepare(draft.image.clone(), given).expect("prepared");
        stock.finish(changes, Given::default()).expect("finished");
        let table = *stock.image().tables.keys().next().expect("a table");
        stock.arrange(table).expect("arranged");
        assert_eq!(
            rustix::fs::seek(at(10), rustix::fs::SeekFrom::Current(-7)),
            Ok(0)
        );
        assert_eq!(read(10), b"restorer's");
    });
    assert_eq!(said, "");
}
