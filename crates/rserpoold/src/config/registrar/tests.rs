use super::*;
use holdfast_proto::registrar::{LifeUnit, PermittedHosts, TakeoverRaceWinner};

fn parse(text: &str) -> Result<RegistrarConfig, ConfigError> {
    RegistrarConfig::parse(Path::new("registrar.toml"), text)
}

fn parse_error(text: &str) -> String {
    parse(text).expect_err(text).to_string()
}

#[test]
fn empty_file_gives_defaults() {
    let (empty, none) = (parse("").unwrap(), RegistrarConfig::load(None).unwrap());
    assert_eq!(format!("{empty:?}"), format!("{none:?}"));
    assert_eq!((none.asap_port, none.enrp_port), (3863, 9901));
    assert_eq!(none.encapsulation, Some(9899));
}

#[test]
fn configured_values_are_applied() {
    let text = r#"
[registrar]
id = 0x1234
listen = ["10.0.0.1", "10.1.0.1"]
asap_port = 0
raw = false
encapsulation_port = 0
send_to_all_at_once = false
batch_delay_us = 250
update_delay_ms = 3
refresh_delay_ms = 70
life_unit = "seconds"
takeover_race = "higher_id"
heartbeat_cycle_ms = 250
last_heard_max_ms = 1000
[[peer]]
addresses = ["10.0.0.2"]
encapsulation_port = 7000
[access]
register = ["10.0.0.0/8"]
[limits]
elements = 7
[multicast]
announce_ms = 1000
[sctp]
rto_max_ms = 600
init_retransmissions = 2
"#;
    let config = parse(text).unwrap();
    assert_eq!(config.id, Some(0x1234));
    assert_eq!((config.listen.len(), config.asap_port), (2, 0));
    assert_eq!((config.raw, config.encapsulation), (false, Some(0)));
    assert!(!config.send_to_all_at_once && RegistrarConfig::default().send_to_all_at_once);
    assert_eq!(config.batch_delay, Duration::from_micros(250));
    assert_eq!(config.update_delay, Duration::from_millis(3));
    let settings = &config.settings;
    assert_eq!(settings.life_unit, LifeUnit::Seconds);
    assert_eq!(settings.takeover_race, TakeoverRaceWinner::HigherId);
    assert_eq!(settings.refresh_delay, Duration::from_millis(70));
    assert_eq!(settings.heartbeat_cycle, Duration::from_millis(250));
    assert_eq!(settings.last_heard_max, Duration::from_secs(1));
    assert_eq!(settings.limits.elements, 7);
    assert_eq!(settings.announce_cycle, Some(Duration::from_secs(1)));
    assert!(
        !settings
            .access
            .register
            .permits_address("11.0.0.1".parse().unwrap())
    );
    assert_eq!(settings.access.resolve, PermittedHosts::Everyone);
    assert_eq!(config.failure.rto_max, Duration::from_millis(600));
    assert_eq!(config.failure.init_retransmissions, 2);
    let peer = "10.0.0.2:9901".parse().unwrap();
    assert_eq!(config.encapsulations().get(&peer), Some(&7000));
}

#[test]
fn tcp_and_tls_are_off_unless_configured() {
    let none = parse("").unwrap().streams;
    assert!(!none.is_on());
    let tls = "[tls]\nca = \"ca.pem\"\ncert = \"/etc/r1.pem\"\nkey = \"r1.key\"\n";
    let streams = parse(tls).unwrap().streams;
    assert_eq!((streams.tcp_port, streams.tls_port), (None, 3864));
    assert!(streams.is_on());
    let names = "[access]\nregister = [\"tls:web\"]\n";
    assert!(parse(&format!("{tls}{names}")).is_ok());
    assert!(parse_error(names).contains("there is no TLS"));
    let registrar = format!("{tls}[access]\nregistrar = [\"tls:r2\"]\n");
    assert!(parse_error(&registrar).contains("access.registrar"));
    let same_port = format!("{tls}[tcp]\nport = 3864\n");
    assert!(parse_error(&same_port).contains("the same"));
    assert!(parse_error("[tcp]\nhandshake_ms = 0\n").contains("handshake_ms"));
}

#[test]
fn invalid_values_are_refused_by_name() {
    let prefix = parse_error("[access]\nregister = [\"10.0.0.0/33\"]\n");
    assert!(
        prefix.contains("registrar.toml:2: access.register"),
        "{prefix}"
    );
    assert!(parse_error("[registrar]\nlisen = []\n").contains("lisen"));
    assert!(parse_error("[registrar]\nlisten = []\n").contains("listen"));
    assert!(parse_error("[registrar]\nlisten = [\"10.0.0.1\", \"::1\"]\n").contains("listen"));
    assert!(parse_error("[registrar]\nraw = false\nencapsulation = false\n").contains("neither"));
    assert!(parse_error("[registrar]\nid = 0\n").contains("registrar.id"));
    assert!(parse_error("[registrar]\nlast_heard_max_ms = 10\n").contains("heartbeat"));
    assert!(parse_error("[sctp]\nrto_max_ms = 100\n").contains("[sctp]"));
    assert!(parse_error("[sctp]\npath_mtu = 100\n").contains("sctp.path_mtu"));
    assert!(parse_error("[limits]\nipv6_host_bits = 129\n").contains("ipv6_host_bits"));
    assert!(parse_error("[limits]\nmessages_per_second = 0\n").contains("messages_per_second"));
    assert!(parse_error("[[peer]]\naddresses = []\n").contains("peer"));
    assert!(parse_error("[multicast]\nenrp_group = \"10.0.0.1:9901\"\n").contains("group"));
}
