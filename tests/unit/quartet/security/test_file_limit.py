"""The limit of open files of Quartet's processes."""

import resource

from quartet.security.file_limit import raise_file_limit


def test_the_limit_of_files_is_raised_to_what_the_process_may_have() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
        assert raise_file_limit() == min(before[1], 65_536)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(before[1], 65_536)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
