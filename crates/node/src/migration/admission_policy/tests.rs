//! Tests of the admission policy.

use std::collections::BTreeMap;

use super::*;

fn policy(enabled: bool) -> AdmissionPolicy {
    let config = MigrationConfig {
        enabled,
        users: BTreeSet::from([1000]),
        groups: BTreeSet::from([100]),
        paths: vec!["/usr/games".into()],
        files: vec!["/var/log/game".into()],
        families: [SocketFamily::Ipv4, SocketFamily::Unix].into(),
        ports: BTreeSet::new(),
    };
    AdmissionPolicy::new(&config, MovableAddresses::default(), [])
}

fn identity(user: u32, groups: &[u32]) -> UserIdentity {
    UserIdentity {
        user,
        group: 100,
        groups: groups.to_vec(),
    }
}

fn game_description(user: u32, program: &str) -> ProcessDescription {
    ProcessDescription {
        name: "game".into(),
        users: BTreeSet::from([user]),
        identities: BTreeSet::from([identity(user, &[100])]),
        programs: BTreeSet::from([program.to_owned()]),
        group: None,
        risky_locks: Vec::new(),
    }
}

#[test]
fn only_allowed_processes_are_accepted() {
    let allowed = game_description(1000, "/usr/games/server");
    assert_eq!(policy(true).refusals(&allowed, 1), Vec::new());
    assert_eq!(policy(false).refusals(&allowed, 1).len(), 1);
    for (user, program, why) in [
        (1001, "/usr/games/server", "user 1001"),
        (1000, "/usr/gamesome/server", "/usr/gamesome"),
        (1000, "/usr/games/../bin/sh", "/usr/games/../bin/sh"),
    ] {
        let refusals = policy(true).refusals(&game_description(user, program), 1);
        assert_eq!(refusals.len(), 1, "{refusals:?}");
        assert!(refusals[0].to_string().contains(why), "{refusals:?}");
    }
    let refusals = policy(true).refusals(&allowed, u64::MAX);
    assert!(refusals[0].to_string().contains("MiB"), "{refusals:?}");
}

#[test]
fn received_image_is_judged_again() {
    use holdfast_checkpoint::image::{
        BackingFile, Credentials, ProcessLayout, ProcessState, ProcessTreeState, ResourceLimit,
        ThreadState, TreeLayout,
    };
    let tree = |path: &str| TreeLayout {
        processes: vec![ProcessLayout {
            credentials: Credentials {
                uids: [1000; 4],
                gids: [100; 4],
                ..Credentials::default()
            },
            ..ProcessLayout::default()
        }],
        files: vec![BackingFile {
            path: path.into(),
            ..BackingFile::default()
        }],
        ..TreeLayout::default()
    };
    assert_eq!(
        policy(true).judge().check_tree(&tree("/usr/games/server")),
        Ok(())
    );
    assert!(policy(true).judge().check_tree(&tree("/bin/sh")).is_err());
    let frozen = |uids: [u32; 4], group: u32, permitted: u64| {
        let mut thread = ThreadState::default();
        thread.credentials.uids = uids;
        thread.credentials.gids = [100; 4];
        thread.credentials.groups = vec![group];
        thread.credentials.capabilities[1] = permitted;
        let process = ProcessState {
            threads: vec![thread],
            limits: vec![ResourceLimit::default(); 16],
            ..ProcessState::default()
        };
        ProcessTreeState {
            processes: vec![Some(process)],
        }
    };
    assert_eq!(
        policy(true).judge().check_state(&frozen([1000; 4], 100, 0)),
        Ok(())
    );
    assert!(
        policy(true)
            .judge()
            .check_state(&frozen([1000, 1000, 0, 1000], 100, 0))
            .is_err()
    );
    assert!(
        policy(true)
            .judge()
            .check_state(&frozen([1000; 4], 42, 0))
            .is_err()
    );
    assert!(
        policy(true)
            .judge()
            .check_state(&frozen([1000; 4], 100, 1 << 12))
            .is_err()
    );
}

/// An identity with which files are opened is checked like a user: otherwise the process would get that user's files.
#[test]
fn file_identities_must_be_allowed_users() {
    let refusals_for = |identity: UserIdentity| {
        let description = ProcessDescription {
            identities: BTreeSet::from([identity]),
            ..game_description(1000, "/usr/games/server")
        };
        policy(true).refusals(&description, 1)
    };
    assert_eq!(refusals_for(identity(1000, &[])), Vec::new());
    let refusals = refusals_for(identity(1001, &[]));
    assert!(
        refusals.len() == 1 && refusals[0].to_string().contains("user 1001"),
        "{refusals:?}"
    );
    let refusals = refusals_for(identity(1000, &[42]));
    assert!(
        refusals.len() == 1 && refusals[0].to_string().contains("group 42"),
        "{refusals:?}"
    );
}

#[test]
fn process_may_open_files_of_its_users_and_of_policy() {
    let game = game_description(1000, "/usr/games/server");
    assert_eq!(
        *policy(true).for_process(&game).rights(),
        FileRights::Limited {
            identities: BTreeSet::from([identity(1000, &[100])]),
            directories: vec!["/var/log/game".into()],
        }
    );
    let mut root_policy = policy(true);
    root_policy.config.users.insert(0);
    assert_eq!(*root_policy.for_process(&game).rights(), FileRights::Root);
    // Without an offer, the policy allows no files.
    let FileRights::Limited {
        identities: whose,
        directories: files,
    } = policy(true).rights().clone()
    else {
        panic!("everything");
    };
    assert!(whose.is_empty() && files.is_empty());
}

#[test]
fn unlisted_socket_family_is_refused() {
    use holdfast_checkpoint::files::FilesImage;
    use holdfast_checkpoint::files::image::{NetlinkSocket, OpenFile, OpenFileKind};
    use holdfast_checkpoint::image::OpenFilesUpdate;
    use holdfast_checkpoint::sockets::SocketStaticState;
    let sockets = |v6_socket| DescriptorUpdate {
        files: OpenFilesUpdate::Image(FilesImage::default()),
        sockets: BTreeMap::from([(0, SocketStaticState::Ended { v6_socket })]),
        removed: BTreeSet::new(),
    };
    assert_eq!(policy(true).check_descriptors(&sockets(false)), Ok(()));
    let refusal = policy(true).check_descriptors(&sockets(true));
    assert!(refusal.is_err_and(|why| why.to_string().contains("family ipv6")));
    // Changed descriptors are judged like initial ones.
    let netlink = OpenFile {
        flags: 0,
        owner: None,
        locks: Vec::new(),
        kind: OpenFileKind::Netlink(NetlinkSocket {
            socket: 3,
            port: 0,
            groups: Vec::new(),
            options: Vec::new(),
            filter: holdfast_sys::socket_filter::SocketFilter::default(),
        }),
    };
    let mut image = FilesImage::default();
    image.files.insert(0, netlink);
    let changes = image.changes_since(&FilesImage::default());
    for files in [
        OpenFilesUpdate::Image(image),
        OpenFilesUpdate::Changes(changes),
    ] {
        let found = DescriptorUpdate {
            files,
            sockets: BTreeMap::new(),
            removed: BTreeSet::new(),
        };
        let refusal = policy(true).check_descriptors(&found);
        assert!(refusal.is_err_and(|why| why.to_string().contains("family netlink")));
    }
}
