//! A connection that is restored long before the freeze is neither probed nor given up.

mod common;

use holdfast_lab::testing::{
    RouteTarget, TestNetwork, exchange, pattern, service_addresses, stream,
};
use holdfast_sys::sockopt::{get_int, set_int};
use holdfast_tcp_repair::{
    SocketPreparer, WindowProbe, abandon, activate, extract, read_static, restore, resume,
    set_deferred_options_and_timeout,
};
use libc::{IPPROTO_TCP, SOL_SOCKET};
use std::os::fd::AsFd;
use std::time::Duration;

/// Keepalive options: an idle connection is probed after 1 s, and given up and reset 1 s later.
const SHORT_KEEPALIVE: [(i32, i32, i32); 4] = [
    (IPPROTO_TCP, libc::TCP_KEEPIDLE, 1),
    (IPPROTO_TCP, libc::TCP_KEEPINTVL, 1),
    (IPPROTO_TCP, libc::TCP_KEEPCNT, 1),
    (SOL_SOCKET, libc::SO_KEEPALIVE, 1),
];
/// Longer than the keepalive timeout.
const WAIT: Duration = Duration::from_secs(4);

#[test]
fn keepalive_does_not_reset_connection_in_repair_mode() {
    let net = TestNetwork::new();
    for service in service_addresses() {
        net.route(RouteTarget::A);
        let (mut client, mut server) = net.connection(service);
        exchange(&mut client, &mut server, &pattern(1, 2000));
        for (level, name, value) in SHORT_KEEPALIVE {
            set_int(server.as_fd(), level, name, value).expect("setsockopt");
        }
        let fixed = net.a.run(|| read_static(server.as_fd()).expect("static"));
        let state = extract(server.as_fd(), &fixed).expect("dynamic state");
        resume(server.as_fd(), &fixed).expect("resumed");
        let preparer = net.b.run(|| SocketPreparer::new().expect("a preparer"));
        let socket = net.b.run(|| preparer.prepare(&fixed).expect("prepared"));
        let restored = net.b.run(|| restore(socket, &fixed, &state));
        let restored = restored.expect("restored");
        // The wait shows that nothing happens.
        std::thread::sleep(WAIT);
        exchange(&mut client, &mut server, &pattern(2, 300));
        let socket = net.b.run(|| restored.reset_to_prepared(&fixed, &preparer));
        net.route(RouteTarget::Unreachable);
        let last_state = extract(server.as_fd(), &fixed).expect("dynamic state");
        let restored = net
            .b
            .run(|| restore(socket.expect("reset"), &fixed, &last_state));
        net.route(RouteTarget::B);
        abandon(server.as_fd()).expect("abandoned");
        let activated = activate(
            restored.expect("restored"),
            &fixed,
            &last_state,
            WindowProbe::Never,
        );
        let live = activated.expect("active");
        set_deferred_options_and_timeout(live.as_fd(), &fixed).expect("settled");
        for (level, name, value) in SHORT_KEEPALIVE {
            assert_eq!(get_int(live.as_fd(), level, name).ok(), Some(value));
        }
        let mut moved = stream(live);
        exchange(&mut client, &mut moved, &pattern(3, 5000));
        exchange(&mut moved, &mut client, &pattern(4, 5000));
        // The activated connection is probed again, and the client answers.
        std::thread::sleep(WAIT);
        exchange(&mut client, &mut moved, &pattern(5, 100));
    }
}
