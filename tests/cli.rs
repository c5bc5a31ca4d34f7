//! What the commands print: help pages, dry runs, bad input. `tests/cli/*.trycmd` hold commands with their
//! output; `[..]` stands for anything.

#[test]
fn commands_print_what_is_written_down() {
    trycmd::TestCases::new().case("tests/cli/*.trycmd").env("EFFATTN_LOG", "error");
}
