use super::*;

fn parse(text: &str) -> Result<PoolConfig, ConfigError> {
    PoolConfig::parse(Path::new("pool.toml"), text)
}

fn parse_error(text: &str) -> String {
    parse(text).expect_err(text).to_string()
}

#[test]
fn empty_file_gives_defaults_and_local_registrar() {
    let (empty, none) = (parse("").unwrap(), PoolConfig::load(None).unwrap());
    assert_eq!(format!("{empty:?}"), format!("{none:?}"));
    let local: SocketAddr = "127.0.0.1:3863".parse().unwrap();
    assert_eq!(none.known_registrars(), ["127.0.0.1".parse().unwrap()]);
    assert!(none.admits_registrar(&[local]));
    assert!(!none.admits_registrar(&["10.0.0.1:3863".parse().unwrap()]));
}

#[test]
fn configured_values_are_applied() {
    let text = r#"
[pool]
listen = ["10.0.0.1", "10.1.0.1"]
raw = false
encapsulation_port = 7000
registrars = ["10.0.0.2", "10.0.0.3:4000"]
life_unit = "seconds"
life_ms = 30000
update_interval_ms = 40
[access]
registrar = ["10.9.0.0/16"]
[multicast]
group = "239.0.0.60:3863"
interfaces = ["a0"]
[sctp]
init_retransmissions = 2
"#;
    let config = parse(text).unwrap();
    assert_eq!((config.listen.len(), config.raw), (2, false));
    assert_eq!(config.encapsulation, UdpEncapsulation::Port(7000));
    let addresses =
        ["10.0.0.2:3863", "10.0.0.3:4000"].map(|at| at.parse::<RegistrarAddress>().unwrap());
    assert_eq!(config.known_registrars(), addresses);
    assert!(config.admits_registrar(&["10.0.0.3:9".parse().unwrap()]));
    assert!(config.admits_registrar(&["10.9.1.1:9".parse().unwrap()]));
    assert!(!config.admits_registrar(&["10.8.1.1:9".parse().unwrap()]));
    assert_eq!(config.life_unit, LifeUnit::Seconds);
    assert_eq!(config.life, Duration::from_secs(30));
    assert_eq!(config.update_interval, Duration::from_millis(40));
    assert_eq!(config.announces.group, "239.0.0.60:3863".parse().unwrap());
    assert_eq!(config.failure.init_retransmissions, 2);
}

#[test]
fn trusted_announces_need_no_registrar() {
    let config = parse("[multicast]\nannounces = true\n").unwrap();
    assert!(config.known_registrars().is_empty());
    assert!(config.admits_registrar(&["10.8.1.1:9".parse().unwrap()]));
}

#[test]
fn tls_registrar_requires_certificates_and_is_not_an_sctp_registrar() {
    let tls = "[tls]\nca = \"ca.pem\"\ncert = \"/etc/web.pem\"\nkey = \"web.key\"\n";
    let tls_registrar = "[pool]\nregistrars = [\"tls://r1@10.0.0.2\"]\n";
    let config = parse(&format!("{tls_registrar}{tls}")).unwrap();
    let files = config.tls.as_ref().expect("certificates");
    assert_eq!(files.cert, Path::new("/etc/web.pem"));
    assert!(!config.admits_registrar(&["10.0.0.2:3863".parse().unwrap()]));
    assert!(parse_error(tls_registrar).contains("no certificate"));
    let announced = format!("{tls_registrar}{tls}[multicast]\nannounces = true\n");
    assert!(parse_error(&announced).contains("multicast.announces is enabled"));
    let repeated = "[pool]\nregistrars = [\"tcp://10.0.0.2\", \"tcp://10.0.0.2:3863\"]\n";
    assert!(parse_error(repeated).contains("listed twice"));
    let both_transports = "[pool]\nregistrars = [\"10.0.0.2\", \"tcp://10.0.0.2\"]\n";
    assert!(parse(both_transports).is_ok());
}

#[test]
fn invalid_values_are_refused_by_name() {
    let registrar = parse_error("[pool]\nregistrars = [\"here\"]\n");
    assert!(
        registrar.contains("pool.toml:2: pool.registrars"),
        "{registrar}"
    );
    assert!(parse_error("[pool]\nlisen = []\n").contains("lisen"));
    assert!(parse_error("[pool]\nlisten = []\n").contains("listen"));
    assert!(parse_error("[pool]\nregistrars = [\"::1\"]\n").contains("registrar"));
    assert!(parse_error("[pool]\nraw = false\nencapsulation = false\n").contains("neither"));
    assert!(parse_error("[access]\nregistrar = [\"10.0.0.0/33\"]\n").contains("access.registrar"));
    assert!(parse_error("[multicast]\ngroup = \"10.0.0.1:1\"\n").contains("multicast"));
    assert!(parse_error("[sctp]\npath_mtu = 10\n").contains("path_mtu"));
    assert!(parse_error("[pool]\nlife_ms = 0\n").contains("life"));
}
