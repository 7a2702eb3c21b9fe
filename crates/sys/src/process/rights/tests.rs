//! Tests that a tree opens the files that its users could open, and no others.

use super::opener::Opener;
use super::{Identity, Rights};
use rustix::fs::OFlags;
use std::fs;
use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};

/// IDs that no user and no group has.
const USER: u32 = 61_234;
const OTHER: u32 = 61_235;
const GROUP: u32 = 61_236;

/// A directory that all users may enter, with one file each for root, the user, the group, and all users.
struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    /// Creates the directory; `None` if the test does not run as root.
    fn new() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: other users need root");
            return None;
        }
        let folder = tempfile::tempdir().expect("a folder");
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).expect("opened");
        let place = Self { folder };
        for (name, user, group, mode) in [
            ("roots", 0, 0, 0o600),
            ("users", USER, 0, 0o600),
            ("groups", 0, GROUP, 0o660),
            ("all", 0, 0, 0o644),
        ] {
            let path = place.path(name);
            fs::write(&path, name).expect("written");
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("a mode");
            chown(&path, Some(user), Some(group)).expect("an owner");
        }
        Some(place)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

fn opener(users: &[(u32, &[u32])], files: &[&Path]) -> Opener {
    let identity = |(user, groups): &(u32, &[u32])| Identity {
        user: *user,
        group: OTHER,
        groups: groups.to_vec(),
    };
    Opener::new(Rights::Of {
        whose: users.iter().map(identity).collect(),
        files: files.iter().map(|path| path.to_path_buf()).collect(),
    })
}

#[track_caller]
fn is_refused<T: std::fmt::Debug>(outcome: std::io::Result<T>) {
    let kind = outcome.map_err(|error| error.kind());
    assert!(matches!(kind, Err(ErrorKind::PermissionDenied)), "{kind:?}");
}

#[test]
fn a_file_is_opened_by_who_may_open_it() {
    let Some(place) = Place::new() else { return };
    let mut one = opener(&[(USER, &[])], &[]);
    one.open(&place.path("users"), OFlags::RDWR)
        .expect("its own");
    one.open(&place.path("all"), OFlags::RDONLY)
        .expect("anybody's");
    is_refused(one.open(&place.path("all"), OFlags::RDWR));
    is_refused(one.open(&place.path("roots"), OFlags::RDONLY));
    is_refused(one.open(&place.path("groups"), OFlags::RDONLY));
    let mut both = opener(&[(OTHER, &[GROUP]), (USER, &[])], &[]);
    both.open(&place.path("users"), OFlags::RDWR)
        .expect("the second's");
    both.open(&place.path("groups"), OFlags::RDWR)
        .expect("the group's");
    is_refused(both.open(&place.path("roots"), OFlags::RDONLY));
    is_refused(opener(&[], &[]).open(&place.path("all"), OFlags::RDONLY));
    Opener::default()
        .open(&place.path("roots"), OFlags::RDWR)
        .expect("root may all");
}

#[test]
fn a_directory_of_the_policy_is_open_to_all_that_come() {
    let Some(place) = Place::new() else { return };
    let directory = place.path("logs");
    fs::create_dir(&directory).expect("made");
    let log = directory.join("log");
    fs::write(&log, "").expect("written");
    fs::set_permissions(&log, fs::Permissions::from_mode(0o600)).expect("a mode");
    symlink(place.path("roots"), directory.join("link")).expect("a link");
    let mut opener = opener(&[(USER, &[])], &[&directory]);
    opener.open(&log, OFlags::RDWR).expect("below it");
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o700)).expect("a mode");
    let look = opener.open(&log, OFlags::PATH | OFlags::APPEND);
    look.expect("not even to be seen otherwise");
    is_refused(opener.open(&place.path("roots"), OFlags::RDWR));
    is_refused(opener.open(&directory.join("../roots"), OFlags::RDWR));
    // With links, a user with write access to the directory could reach all of root's files.
    let linked = opener.open(&directory.join("link"), OFlags::RDWR);
    let error = linked.expect_err("a link").raw_os_error();
    assert_eq!(error, Some(libc::ELOOP));
}

#[test]
fn memory_of_the_restorer_is_not_opened() {
    if Place::new().is_none() {
        return;
    }
    let mut opener = opener(&[(USER, &[])], &[]);
    let own = std::process::id();
    is_refused(opener.open(Path::new(&format!("/proc/{own}/mem")), OFlags::RDWR));
    is_refused(opener.open(Path::new(&format!("/proc/{own}/environ")), OFlags::RDONLY));
    opener
        .open(Path::new(&format!("/proc/{own}/status")), OFlags::RDONLY)
        .expect("anybody may");
}

#[test]
fn files_without_a_name_are_whose_they_may_be() {
    let Some(place) = Place::new() else { return };
    let mut opener = opener(&[(USER, &[])], &[]);
    let path = place.path("gone");
    is_refused(opener.nameless(&path, true, (USER, OTHER, 0o600)));
    chown(place.folder.path(), Some(USER), None).expect("an owner");
    for (path, name_is_known) in [(path.as_path(), true), (place.folder.path(), false)] {
        let fd = opener.nameless(path, name_is_known, (USER, OTHER, 0o640));
        let found = rustix::fs::fstat(fd.expect("its own")).expect("is there");
        assert_eq!(
            (found.st_uid, found.st_gid, found.st_nlink),
            (USER, OTHER, 0)
        );
        assert_eq!(found.st_mode & 0o7777, 0o640);
        is_refused(opener.nameless(path, name_is_known, (0, 0, 0o4755)));
    }
    assert!(!path.exists());
}

#[test]
fn nobody_connects_or_watches_with_the_rights_of_root() {
    let Some(place) = Place::new() else { return };
    let path = place.path("socket");
    let listener = std::os::unix::net::UnixListener::bind(&path).expect("bound");
    let client = rustix::net::socket(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::STREAM,
        None,
    )
    .expect("a socket");
    let mut address = (libc::AF_UNIX as u16).to_ne_bytes().to_vec();
    address.extend(std::os::unix::ffi::OsStrExt::as_bytes(path.as_os_str()));
    address.push(0);
    let mut opener = opener(&[(USER, &[])], &[]);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("a mode");
    is_refused(opener.connect(client.as_fd(), &address));
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).expect("a mode");
    opener.connect(client.as_fd(), &address).expect("all may");
    let (accepted, _) = listener.accept().expect("it came");
    let who = rustix::net::sockopt::socket_peercred(&accepted).expect("somebody");
    assert_eq!((who.uid.as_raw(), who.gid.as_raw()), (USER, OTHER));

    let flags = rustix::fs::inotify::CreateFlags::CLOEXEC;
    let watcher = rustix::fs::inotify::init(flags).expect("inotify");
    let mask = libc::IN_MODIFY;
    opener
        .watch(watcher.as_fd(), &place.path("all"), mask)
        .expect("anybody's");
    is_refused(opener.watch(watcher.as_fd(), &place.path("roots"), mask));
}

#[test]
fn who_may_not_write_a_directory_makes_no_files_in_it() {
    let Some(place) = Place::new() else { return };
    let mut opener = opener(&[(USER, &[])], &[]);
    is_refused(opener.open_writable(place.folder.path()));
    chown(place.folder.path(), Some(USER), None).expect("an owner");
    opener.open_writable(place.folder.path()).expect("its own");
}

#[test]
fn a_deputy_is_gone_when_it_rests() {
    let Some(place) = Place::new() else { return };
    let mut opener = opener(&[(USER, &[])], &[]);
    let fd = opener
        .open(&place.path("all"), OFlags::RDONLY)
        .expect("opened");
    opener.rest();
    let tasks = fs::read_to_string(format!("/proc/self/task/{}/children", thread())).expect("read");
    assert_eq!(tasks.trim(), "");
    let link = fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).expect("stays");
    assert_eq!(link, place.path("all"));
}

fn thread() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}
