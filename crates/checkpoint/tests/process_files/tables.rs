//! Whole descriptor tables: shared and large ones, pidfds, and sockets that are passed through.

use crate::harness::{Donor, borrow_fd, fork_child, put_at, read_available, stop_self};
use holdfast_checkpoint::files::image::{FileId, OpenFileKind};
use holdfast_checkpoint::files::{FdStore, FilesSnapshot, ProvidedFiles, SaveLimits};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{Mode, OFlags, open};
use std::collections::BTreeMap;
use std::fs::File;
use std::net::{TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

#[test]
fn processes_keep_sharing_a_table() {
    let donor = Donor::new(|| {
        put_at(File::open("/dev/zero").expect("open"), 10);
        // SAFETY: as `fork_child`, with the descriptor table shared.
        let child = unsafe {
            let flags = libc::CLONE_FILES | libc::SIGCHLD;
            libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0)
        };
        if child == 0 {
            put_at(File::open("/dev/null").expect("open"), 11);
            stop_self();
        }
        let child = rustix::process::Pid::from_raw(child as i32);
        let stopped = rustix::process::WaitOptions::UNTRACED;
        rustix::process::waitpid(child, stopped).expect("waited");
        if fork_child().is_none() {
            put_at(File::open("/dev/full").expect("open"), 12);
            stop_self();
        }
        stop_self();
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
    let saved = donor.save_unchanged();
    let tables: Vec<_> = saved.frozen.tables.values().collect();
    assert_eq!(tables.len(), 2);
    assert_eq!(tables[0].pids, pids[..2].iter().copied().collect());
    assert_eq!(tables[1].pids, [pids[2]].into());
    saved.restore_and_check(|table| {
        assert_eq!(read_available(10)[..4], [0; 4]);
        assert!(rustix::io::fcntl_getfd(borrow_fd(11)).is_ok());
        assert_eq!(rustix::io::fcntl_getfd(borrow_fd(12)).is_ok(), table == 1);
    });
}

#[test]
fn thousands_of_descriptors_move_within_the_limit() {
    let many = 4_000;
    let donor = Donor::new(|| {
        for number in 0..many {
            put_at(
                eventfd(number as u32, EventfdFlags::NONBLOCK).expect("made"),
                3 + number,
            );
        }
        stop_self();
    });
    donor.save_unchanged().restore_and_check(|_| {
        for number in 0..many as u64 {
            let expected = if number == 0 { 0 } else { number };
            let mut count = [0; 8];
            let outcome = rustix::io::read(borrow_fd(3 + number as i32), &mut count);
            assert_eq!(outcome.is_ok(), number > 0);
            assert_eq!(u64::from_ne_bytes(count), expected);
        }
    });
}

#[test]
fn separate_opens_of_one_file_stay_separate() {
    let donor = Donor::new(|| {
        for number in (10..500).step_by(2) {
            put_at(File::open("/dev/null").expect("open"), number);
            put_at(
                rustix::io::dup(borrow_fd(number)).expect("dup"),
                1001 - number,
            );
        }
        stop_self();
    });
    let saved = donor.save_unchanged();
    let table = saved.frozen.tables.values().next().expect("a table");
    let mut open_files = std::collections::BTreeSet::new();
    for number in (10..500).step_by(2) {
        assert_eq!(
            table.slots[&number].file,
            table.slots[&(1001 - number)].file
        );
        assert!(open_files.insert(table.slots[&number].file));
    }
    // One more open file stands at 0, 1 and 2: input, output and errors.
    assert_eq!(saved.frozen.files.len(), 245 + 1);
}

#[test]
fn pidfd_refers_to_restored_process() {
    let donor = Donor::new(|| {
        let own = rustix::process::getpid();
        let flags = rustix::process::PidfdFlags::empty();
        put_at(rustix::process::pidfd_open(own, flags).expect("made"), 10);
        put_at(
            open("/dev/null", OFlags::PATH, Mode::empty()).expect("open"),
            11,
        );
        stop_self();
    });
    let pid = donor.pids()[0];
    donor.save_unchanged().restore_and_check(|_| {
        let info = std::fs::read_to_string("/proc/self/fdinfo/10").expect("read");
        assert!(info.contains(&format!("Pid:\t{pid}\n")), "{info}");
        assert_eq!(
            rustix::io::read(borrow_fd(11), &mut [0; 1]),
            Err(rustix::io::Errno::BADF)
        );
    });
}

#[test]
fn internet_sockets_are_passed_through() {
    let donor = Donor::new(|| {
        put_at(TcpListener::bind("127.0.0.1:0").expect("bound"), 10);
        put_at(UdpSocket::bind("[::1]:0").expect("bound"), 11);
        let set = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::empty());
        put_at(set.expect("made"), 12);
        let data = rustix::event::epoll::EventData::new_u64(9);
        rustix::event::epoll::add(
            borrow_fd(12),
            borrow_fd(10),
            data,
            rustix::event::epoll::EventFlags::IN,
        )
        .expect("added");
        stop_self();
    });
    let snapshot = donor.snapshot();
    let frozen = snapshot.save_frozen(&donor.pids()).expect("saved");
    assert_eq!(frozen.sockets.len(), 2);
    let mut image = snapshot.image.clone();
    (image.apply(frozen.changes.clone())).expect("an image");
    let kinds: Vec<_> = frozen
        .sockets
        .keys()
        .map(|id| &image.files[id].kind)
        .collect();
    let protocols: Vec<_> = kinds
        .iter()
        .map(|kind| match kind {
            OpenFileKind::Inet {
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
            OpenFileKind::Inet {
                protocol: libc::IPPROTO_TCP,
                ..
            }
        )
    });
    let listener = *listener.expect("a listener").0;
    assert_eq!(
        snapshot
            .image
            .tables
            .values()
            .next()
            .expect("a table")
            .slots[&10]
            .file,
        listener
    );
    let restored = restore_with_sockets(snapshot.image, frozen.changes, frozen.sockets);
    assert_eq!(restored, "");
}

/// Restores the image with these sockets in a separate process.
fn restore_with_sockets(
    image: holdfast_checkpoint::files::FilesImage,
    changes: holdfast_checkpoint::files::FilesImageChanges,
    sockets: BTreeMap<FileId, OwnedFd>,
) -> String {
    let _alone = crate::harness::lift_lock();
    FdStore::raise_limit().expect("limit");
    let lifted: BTreeMap<FileId, OwnedFd> = sockets
        .into_iter()
        .map(|(id, fd)| (id, FdStore::move_caller_fd_up(fd).expect("lifted")))
        .collect();
    crate::harness::panic_message_of_child(|| {
        let mut store = FdStore::prepare(image, ProvidedFiles::default()).expect("prepared");
        let absent = store
            .table_steps(0)
            .expect("steps of a process without a table");
        assert_eq!(absent.len(), 1);
        let sockets = lifted
            .iter()
            .map(|(id, fd)| (*id, OwnedFd::try_clone(fd).expect("dup")));
        let given = ProvidedFiles {
            sockets: sockets.collect(),
            ..ProvidedFiles::default()
        };
        store.apply_final(changes, given).expect("finished");
        let table = *store.image().tables.keys().next().expect("a table");
        store.install_table(table).expect("arranged");
        let listener = TcpListener::from(borrow_fd(10).try_clone_to_owned().expect("dup"));
        let address = listener.local_addr().expect("address");
        let _client = std::net::TcpStream::connect(address).expect("connected");
        let mut events = Vec::with_capacity(4);
        let space = rustix::buffer::spare_capacity(&mut events);
        rustix::event::epoll::wait(borrow_fd(12), space, None).expect("wait");
        assert_eq!({ events[0].data }.u64(), 9);
        assert!(
            UdpSocket::from(borrow_fd(11).try_clone_to_owned().expect("dup"))
                .local_addr()
                .is_ok()
        );
    })
}

#[test]
fn passed_sockets_may_occupy_each_others_numbers() {
    let many = 20;
    let donor = Donor::new(|| {
        for number in 0..many {
            put_at(UdpSocket::bind("127.0.0.1:0").expect("bound"), 10 + number);
        }
        stop_self();
    });
    let snapshot = donor.snapshot();
    let panic_message = crate::harness::panic_message_of_child(|| {
        let table = snapshot.image.tables.values().next().expect("a table");
        let mut given = ProvidedFiles::default();
        let mut expected = Vec::new();
        // Each socket occupies the number that belongs to the third socket after it.
        for number in 0..many {
            let occupied_number = 10 + (number + 3) % many;
            put_at(
                UdpSocket::bind("127.0.0.1:0").expect("bound"),
                occupied_number,
            );
            expected.push(rustix::net::getsockname(borrow_fd(occupied_number)).expect("name"));
            // SAFETY: the number is given up to the store here.
            let fd = unsafe { std::os::fd::FromRawFd::from_raw_fd(occupied_number) };
            given
                .sockets
                .insert(table.slots[&(10 + number as u32)].file, fd);
        }
        let store = FdStore::prepare(snapshot.image.clone(), given).expect("prepared");
        store
            .install_table(*snapshot.image.tables.keys().next().expect("a table"))
            .expect("arranged");
        for (number, expected) in expected.iter().enumerate() {
            let name = rustix::net::getsockname(borrow_fd(10 + number as i32)).expect("name");
            assert_eq!(name, *expected);
        }
    });
    assert_eq!(panic_message, "");
}

#[test]
fn memory_moved_with_mappings_is_passed_in() {
    let donor = Donor::new(|| {
        let memory =
            rustix::fs::memfd_create("mapped", rustix::fs::MemfdFlags::CLOEXEC).expect("made");
        rustix::io::write(&memory, b"donor's").expect("written");
        put_at(memory, 10);
        stop_self();
    });
    let stat = rustix::fs::stat(format!("/proc/{}/fd/10", donor.pids()[0])).expect("stat");
    let limits = SaveLimits {
        mapped_memory: [(stat.st_dev, stat.st_ino)].into(),
        ..SaveLimits::default()
    };
    let snapshot = FilesSnapshot::save(&donor.pids(), &limits).expect("saved");
    let frozen = snapshot.save_frozen(&donor.pids()).expect("saved");
    let content = snapshot.image.contents.values().next().expect("content");
    assert_eq!(content.mapped_memory, Some((stat.st_dev, stat.st_ino)));
    assert!(content.chunks.is_empty());
    let changes = frozen.changes;
    let panic_message = crate::harness::panic_message_of_child(|| {
        let absent = FdStore::prepare(snapshot.image.clone(), ProvidedFiles::default());
        let absent = absent.expect_err("refused").to_string();
        assert!(absent.contains("was not restored"), "{absent}");
        let memory =
            rustix::fs::memfd_create("mapped", rustix::fs::MemfdFlags::CLOEXEC).expect("made");
        rustix::io::write(&memory, b"restorer's").expect("written");
        let given = ProvidedFiles {
            memory: [((stat.st_dev, stat.st_ino), memory)].into(),
            ..ProvidedFiles::default()
        };
        let mut store = FdStore::prepare(snapshot.image.clone(), given).expect("prepared");
        store
            .apply_final(changes, ProvidedFiles::default())
            .expect("finished");
        let table = *store.image().tables.keys().next().expect("a table");
        store.install_table(table).expect("arranged");
        assert_eq!(
            rustix::fs::seek(borrow_fd(10), rustix::fs::SeekFrom::Current(-7)),
            Ok(0)
        );
        assert_eq!(read_available(10), b"restorer's");
    });
    assert_eq!(panic_message, "");
}
