//! Descriptors of a stopped process are saved from outside, restored in another process, and used there.

mod access_rights;
mod blockers;
mod epoll_and_inotify;
mod files;
mod harness;
mod image;
mod listing;
mod pipes_and_timers;
mod prepared_descriptors;
mod running_tree;
mod sockets;
mod tables;
mod terminals;
#[allow(dead_code)]
#[path = "../../../tcp-repair/tests/common/vary.rs"]
mod vary;
